"""The charts of the page as matplotlib figures, for an evaluation that is not in a file yet."""

from __future__ import annotations

from collections.abc import Iterator

from matplotlib.figure import Figure

from assc.report import curves, figures
from assc.report.join import join
from assc.report.load import result_of
from assc.report.regret import regret_of
from assc.results import Evaluation


def pictures_of(evaluation: Evaluation) -> Iterator[tuple[str, Figure]]:
    """Name and figure: ladder, waste against speed, time, regret, and reliability where acceptance was predicted."""
    report = join([result_of(evaluation.to_json(), "this evaluation")])
    regret = regret_of(report)
    charts = {
        "ladder": figures.ladder_chart(report),
        "waste and speed": figures.scatter_chart(report),
        "time": figures.time_chart(report),
        "regret": None if isinstance(regret, str) else figures.regret_chart(report, regret.curves, regret.against),
        "reliability": curves.reliability_chart(report),
    }
    for name, chart in charts.items():
        if chart is not None:
            yield name, chart.figure()
