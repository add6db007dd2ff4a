"""What all request schemas share."""

from pydantic import BaseModel, ConfigDict


class Strict(BaseModel):
    """Nothing unknown, nothing of another type."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


def character_text(value: str) -> str:
    """The text itself. Raises ValueError for what no UTF-8 can carry."""
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError("contains a lone surrogate, which is no character") from None
    return value
