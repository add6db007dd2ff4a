"""Prometheus metrics of the experts: what each rank's have computed, how uneven that is, and what moving them costs."""

from collections.abc import Callable, Iterator, Mapping, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from dp_engine.messages import ExpertReport

COUNTERS: dict[str, tuple[str, Callable[[ExpertReport], float]]] = {
    "phalanx_expert_rows": ("Tokens computed by a rank's experts, once for each expert.", lambda report: report.rows),
    "phalanx_expert_rebalances": (
        "Times the load of all layers' experts was looked at.",
        lambda report: report.rebalances,
    ),
    "phalanx_expert_layers_placed": ("Layers whose experts were placed anew.", lambda report: report.layers_placed),
    "phalanx_expert_moves": ("Experts that came to a rank from others.", lambda report: report.received),
    "phalanx_expert_moved_bytes": (
        "Bytes of the experts that came to a rank from others.",
        lambda report: report.received_bytes,
    ),
    "phalanx_expert_rebalance_seconds": (
        "Time that a rank's steps have waited for the moving of experts.",
        lambda report: report.held_s,
    ),
}


def expert_metrics(gangs: Mapping[int, Mapping[int, ExpertReport]], world_size: int) -> Iterator[Metric]:
    """`gangs`: by gang, the last report of each rank that has sent one. Nothing while there is none."""
    reports = [([str(gang), str(rank)], report) for gang, ranks in gangs.items() for rank, report in ranks.items()]
    if not reports:
        return
    for name, (text, value) in COUNTERS.items():
        counter = CounterMetricFamily(name, text, labels=("gang", "rank"))
        for labels, report in reports:
            counter.add_metric(labels, value(report))
        yield counter
    longest = GaugeMetricFamily(
        "phalanx_expert_rebalance_longest_seconds",
        "The longest that a step has waited for the moving of experts.",
        labels=("gang", "rank"),
    )
    recent = GaugeMetricFamily(
        "phalanx_expert_recent_rows",
        "Tokens computed by a rank's experts of a layer in the last steps.",
        labels=("gang", "rank", "layer"),
    )
    for labels, report in reports:
        longest.add_metric(labels, report.longest_held_s)
        for layer, rows in enumerate(report.recent_rows):
            recent.add_metric([*labels, str(layer)], rows)
    uneven = GaugeMetricFamily(
        "phalanx_expert_imbalance",
        "Busiest rank's share of a layer's rows in the last steps, as a multiple of an even share; 1 is best.",
        labels=("gang", "layer"),
    )
    for gang, ranks in gangs.items():
        if len(ranks) == world_size:
            for layer, share in enumerate(imbalance([report.recent_rows for report in ranks.values()])):
                if share is not None:
                    uneven.add_metric([str(gang), str(layer)], share)
    yield from (longest, recent)
    if uneven.samples:
        yield uneven


def imbalance(rows: Sequence[Sequence[int]]) -> list[float | None]:
    """By layer, from each rank's rows by layer: the greatest over the mean; None where nobody has computed any."""
    return [max(layer) * len(layer) / sum(layer) if sum(layer) else None for layer in zip(*rows, strict=True)]
