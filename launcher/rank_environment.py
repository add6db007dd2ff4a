"""Which environment variables travel from the launcher to the ranks."""

from collections.abc import Mapping

from launcher.config import DECIDED_VARIABLES

TRAVELLING = (
    "HF_", "TRANSFORMERS_", "SAFETENSORS_", "TORCH_", "PYTORCH_", "TRITON_", "OMP_", "KMP_", "MKL_", "ONEDNN_", "DNNL_",
    "NCCL_", "UCX_", "NVSHMEM_", "CUDA_LAUNCH_BLOCKING", "CUDA_DEVICE_MAX_CONNECTIONS", "PHALANX_CACHE",
)  # fmt: skip
SECRET = ("TOKEN", "KEY", "SECRET", "PASSWORD", "CREDENTIAL")


def travelling(environ: Mapping[str, str], named: Mapping[str, str | None]) -> dict[str, str]:
    """The variables that a rank gets: those of the libraries it uses by prefix, and what `ranks.env` names.

    Names that sound like a secret travel only if named. What phalanx decides on (DECIDED_VARIABLES) never travels.
    """
    by_prefix = {
        name: value
        for name, value in environ.items()
        if name.startswith(TRAVELLING)
        and name not in DECIDED_VARIABLES
        and not any(word in name.upper() for word in SECRET)
    }
    asked = {name: environ.get(name) if value is None else value for name, value in named.items()}
    return by_prefix | {name: value for name, value in asked.items() if value is not None}
