"""Every figure and table of the paper (section IV): what is trained, and what the paper says about it.

Rows stand in the order of the paper. With a budget, the most important ones are trained first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

from fedadc.config.presets import PRESETS
from fedadc.config.yaml import overlay, parse_yaml
from fedadc.studies.paper.design import (
    EARLY,
    FINAL,
    GAIN,
    HALFWAY,
    LOST,
    VIRTUAL,
    Claim,
    Design,
    Panel,
    Row,
    Statement,
    Term,
    alike,
    higher,
)

AUGMENT = {"crop": 4, "flip": True}
LRS = [0.1, 0.05, 0.03]  # section IV-A
MARGIN = 0.01  # "almost identical" (section IV-B) is read as: within one point
SIMILAR = 0.03  # "a similar test accuracy level" (section IV-B): within three points
EVALUATION = {"every": 10, "last": 10}


@cache
def _numbers() -> dict[str, Any]:
    text = resources.files(__package__).joinpath("numbers.yaml").read_text(encoding="utf-8")
    tree: dict[str, Any] = parse_yaml(text, "numbers.yaml")
    return tree


# Figures 1 and 2: acceleration (section IV-B)

NESTEROV, HEAVY_BALL, SLOWMO, FEDAVG = "FedADC Nesterov", "FedADC heavy-ball", "SlowMo", "FedAvg"
_GRID = {"local.lr": [0.01, 0.025, 0.05, 0.1], "method.beta": [0.6, 0.7, 0.8, 0.9]}  # section IV-B
_DIGITS_GRID = {"local.lr": [0.2, 0.4, 0.8], "method.beta": [0.6, 0.9]}
_DIGITS_LRS = {"local.lr": [0.1, 0.2, 0.3, 0.4, 0.6, 0.8]}  # as many settings as with beta


def _with_momentum(label: str, importance: int, method: dict[str, Any], lr: float, beta: float) -> Row:
    """The laptop's lr and beta were chosen on validation data of CIFAR-10 at quarter width (docs/results.md)."""
    grids = {"paper": _GRID, "digits": _DIGITS_GRID}
    return Row(label, {"method": method}, importance, grids, {"laptop": {"local.lr": lr, "method.beta": beta}})


ACCELERATION_ROWS = (
    Row(
        FEDAVG, {"method": {"name": "fedavg"}}, 2, {"paper": {"local.lr": _GRID["local.lr"]}, "digits": _DIGITS_LRS},
        {"laptop": {"local.lr": 0.1, "local.clip": 2.0}},
    ),
    _with_momentum(SLOWMO, 1, {"name": "slowmo", "beta": 0.9}, lr=0.01, beta=0.7),
    _with_momentum(HEAVY_BALL, 3, {"name": "fedadc", "beta": 0.9}, lr=0.015, beta=0.95),
    _with_momentum(NESTEROV, 0, {"name": "fedadc", "beta": 0.9, "nesterov": True}, lr=0.015, beta=0.95),
)  # fmt: skip


def _skewed(s: int, rows: tuple[Row, ...] = ACCELERATION_ROWS) -> Panel:
    base = {
        "rounds": 500,
        "data": {
            "name": "cifar10",
            "clients": 100,
            "partition": {"name": "sort", "labels_per_client": s},
            "augment": AUGMENT,
        },
        "model": {"name": "cnn", "width": 1.0},
        "local": {"steps": 8, "batch_size": 64, "lr": 0.05, "weight_decay": 4e-4},
        "cohort": {"ratio": 0.2},
        "evaluate": EVALUATION,
    }
    return Panel(f"s{s}", f"s = {s}", base, rows)


def _order_claims(*panels: str) -> tuple[Claim, ...]:
    better = [higher(p, adc, SLOWMO) for p in panels for adc in (NESTEROV, HEAVY_BALL)]
    return (
        Claim("FedADC outperforms SlowMo", "section IV-B", tuple(better)),
        Claim("SlowMo improves on FedAvg", "section IV-B", tuple(higher(p, SLOWMO, FEDAVG) for p in panels)),
    )


def _wider(skewed: str, less: str, variant: str) -> Statement:
    """The gap between FedADC and SlowMo is larger in one panel than in another."""
    gaps = [(1, skewed, variant), (-1, skewed, SLOWMO), (-1, less, variant), (1, less, SLOWMO)]
    return Statement(tuple(Term(*gap) for gap in gaps))


_WIDER = Claim(
    "the gap between FedADC and SlowMo widens as s falls",
    "section IV-B",
    tuple(_wider(*pair, variant) for pair in (("s2", "s3"), ("s3", "s4")) for variant in (NESTEROV, HEAVY_BALL)),
)


def _figure1(s: int) -> Design:
    panels, title = (_skewed(s),), f"Figure 1, s = {s}: FedAvg, SlowMo and FedADC"
    return Design(f"fig1-s{s}", title, "Figure 1", panels, _order_claims(f"s{s}"), seeds=10)


def _figure2() -> Design:
    rows = tuple(row for row in ACCELERATION_ROWS if row.label in (NESTEROV, HEAVY_BALL))
    panels = tuple(_skewed(s, rows) for s in (2, 3, 4))
    passed = _numbers()["accuracy_passed"]
    final = [Term(1, panel.name, row.label) for panel in panels for row in rows]
    pairs = [("s3", "s2"), ("s4", "s3"), ("s4", "s2")]
    claims = (
        Claim(
            "FedADC passes 80 % within 500 rounds for every s (mean of the last 10 rounds)",
            passed["source"],
            tuple(Statement((term,), low=passed["value"] / 100) for term in final),
            "80 %",
            only_as_published=True,
        ),
        Claim("Nesterov performs slightly better at small s", "section IV-B", (higher("s2", NESTEROV, HEAVY_BALL),)),
        Claim(
            "Nesterov and heavy-ball perform alike at large s (within 1 point)",
            "section IV-B",
            (alike(("s4", NESTEROV), ("s4", HEAVY_BALL), MARGIN),),
        ),
        Claim(
            "FedADC converges to a similar accuracy for every s (within 3 points)",
            "section IV-B",
            tuple(alike((more, row.label), (less, row.label), SIMILAR) for more, less in pairs for row in rows),
        ),
        Claim(
            "convergence slows down as s falls (accuracy at a fifth of the rounds)",
            "section IV-B",
            tuple(
                Statement((Term(1, more, row.label, EARLY), Term(-1, less, row.label, EARLY)))
                for more, less in pairs[:2]
                for row in rows
            ),
        ),
    )
    return Design("fig2", "Figure 2: FedADC across s", "Figure 2", panels, claims, seeds=10)


# Table I and its curves in Figures 3 and 4: drift control (section IV-C)

FEDADC, FEDADC_PLUS, FEDDYN = "FedADC", "FedADC+", "FedDyn"
_OWN_GRIDS = {  # what the paper searched beside the learning rate
    FEDDYN: {"method.alpha": [0.1, 0.01, 0.001]},
    "FedProx": {"method.mu": [0.1, 0.01, 0.001]},
}
_DIGITS = {  # chosen by validation accuracy on digits, s = 2 (experiments/digits.yaml)
    FEDAVG: {"local.lr": 0.4},
    "MOON": {"local.lr": 0.1, "objective.mu": 0.1},
    "FedGKD": {"local.lr": 0.2, "objective.lam": 0.3},
    "FedNTD": {"local.lr": 0.2},
    FEDDYN: {"local.lr": 0.4},
    "FedProx": {"local.lr": 0.4},
    FEDADC: {"local.lr": 0.4, "method.beta": 0.6},
    FEDADC_PLUS: {"local.lr": 0.4},
    "FedRS": {"local.lr": 0.2, "objective.alpha": 0.9},
}
_BY_IMPORTANCE = [FEDADC, FEDADC_PLUS, FEDAVG, FEDDYN, "FedNTD", "FedGKD", "FedRS", "FedProx", "MOON"]


def _preset_row(label: str) -> Row:
    """A row of Table I: the preset of that method, and the grid that the paper searched."""
    preset = PRESETS[label.lower()]
    grid = {"objective.mu": [1.0, 5.0]} if label == "MOON" else {"local.lr": LRS, **_OWN_GRIDS.get(label, {})}
    return Row(label, preset.tree, _BY_IMPORTANCE.index(label), {"paper": grid}, {"digits": _DIGITS[label]})


TABLE_ROWS = tuple(map(_preset_row, _DIGITS))
WEIGHT_DECAY = "weight decay: as section IV-C states; the grid that section IV-A also mentions is not searched"


def _drift_base(data: Mapping[str, Any], model: str, weight_decay: float, ratio: float) -> dict[str, Any]:
    return {
        "rounds": 500,
        "data": {"clients": 100, "augment": AUGMENT, **data},
        "model": {"name": model},
        "local": {"epochs": 2, "batch_size": 50, "lr": 0.05, "weight_decay": weight_decay},
        "cohort": {"ratio": ratio},
        "evaluate": EVALUATION,
    }


def _cifar10(ratio: float) -> dict[str, Any]:
    partition = {"name": "sort", "labels_per_client": 2}
    return _drift_base({"name": "cifar10", "partition": partition}, "cnn", 5e-5, ratio)


def _cifar100(alpha: float, ratio: float) -> dict[str, Any]:
    partition = {"name": "dirichlet", "alpha": alpha}
    return _drift_base({"name": "cifar100", "partition": partition}, "resnet18", 5e-4, ratio)


def _short(share: float) -> str:
    return f"{share:g}".replace(".", "")


def _column(ratio: float, alpha: float | None = None) -> Panel:
    """A column of Table I. FedRS is not in those of CIFAR-100, as in the paper."""
    if alpha is None:
        name, skew, base, rows = f"c10-c{_short(ratio)}", "s = 2", _cifar10(ratio), TABLE_ROWS
    else:
        name, skew, base = f"c100-a{_short(alpha)}-c{_short(ratio)}", f"α = {alpha:g}", _cifar100(alpha, ratio)
        rows = tuple(row for row in TABLE_ROWS if row.label != "FedRS")
    found = {label: (mean, std) for label, (mean, std) in _numbers()["table1"]["columns"][name].items()}
    return Panel(name, f"{skew}, C = {ratio:g}", base, rows, found, remark=WEIGHT_DECAY)


def _columns() -> tuple[Panel, ...]:
    dirichlet = [(0.5, 0.2), (0.1, 0.2), (0.5, 0.1), (0.1, 0.1)]
    cifar10 = [_column(ratio) for ratio in (0.2, 0.1)]
    return (*cifar10, *(_column(ratio, alpha) for alpha, ratio in dirichlet))


def _best_of(panel: Panel) -> Claim:
    others = [row.label for row in panel.rows if row.label != FEDADC_PLUS]
    return Claim(
        f"FedADC+ is the best method: {panel.title}",
        "Table I",
        tuple(higher(panel.name, FEDADC_PLUS, other) for other in others),
    )


def _above_nearest(panel: Panel) -> Claim:
    ahead = tuple(higher(panel.name, adc, FEDDYN, HALFWAY) for adc in (FEDADC_PLUS, FEDADC))
    return Claim(f"FedADC and FedADC+ are ahead of FedDyn at half of the rounds: {panel.title}", "section IV-C", ahead)


def _table(name: str, panels: tuple[Panel, ...]) -> Design:
    title = "Table I: nine methods" + (f", {panels[0].title}" if len(panels) == 1 else "")
    return Design(name, title, "Table I", panels, tuple(map(_best_of, panels)))


def _curves_of_table(name: str, title: str, panels: tuple[Panel, ...]) -> Design:
    return Design(name, title, title.partition(":")[0], panels, tuple(map(_above_nearest, panels)))


# Figures 5 and 6: many clients (section IV-C)


def _many(clients: int, epochs: int) -> Panel:
    base = overlay(
        _cifar100(0.1, 0.1),
        {"data": {"clients": clients}, "local": {"epochs": epochs}, "cohort": {"ratio": None, "size": 10}},
    )
    rows = tuple(row for row in TABLE_ROWS if row.label in (FEDADC_PLUS, FEDDYN))
    title = f"{clients} clients, {epochs} local epochs"
    return Panel(f"n{clients}-e{epochs}", title, base, rows, remark=WEIGHT_DECAY)


def _many_clients(name: str, title: str, *panels: Panel) -> Design:
    final = tuple(higher(panel.name, FEDADC_PLUS, FEDDYN) for panel in panels)
    faster = tuple(higher(panel.name, FEDADC_PLUS, FEDDYN, HALFWAY) for panel in panels)
    claims = [
        Claim("FedADC+ has a higher final accuracy than FedDyn", "section IV-C", final),
        Claim("FedADC+ is ahead of FedDyn at half of the rounds", "section IV-C", faster),
    ]
    if name in ("fig5-2", "fig5-5"):
        claims += [_converges(panels[0].name), _struggles(panels[0].name)]
    return Design(name, title, title.partition(":")[0], panels, tuple(claims))


def _converges(panel: str) -> Claim:
    text = "FedADC+ converges: it ends less than 2 points below its best round"
    lost = Statement((Term(1, panel, FEDADC_PLUS, LOST),), low=-math.inf, high=2 * MARGIN)
    return Claim(text, "section IV-C", (lost,))


def _struggles(panel: str) -> Claim:
    behind = (Term(1, panel, FEDADC_PLUS), Term(-1, panel, FEDDYN))
    text = "FedDyn struggles: it ends more than 2 points below FedADC+"
    return Claim(text, "section IV-C", (Statement(behind, low=2 * MARGIN),))


# Figure 7 and section IV-E


def _figure7() -> Design:
    row = next(row for row in TABLE_ROWS if row.label == FEDADC_PLUS)
    panel = Panel("calibration", "α = 0.1, C = 0.1", _cifar100(0.1, 0.1), (row,), remark=WEIGHT_DECAY)
    gain, kinds = _numbers()["calibration_gain"], ("none", "prox", "confidence")
    gains = tuple(Statement((Term(1, panel.name, FEDADC_PLUS, GAIN + kind),)) for kind in kinds)
    claim = Claim(
        "calibration improves on the global model, with each of the three regularizers",
        gain["source"],
        gains,
        f"+{gain['low']} to +{gain['high']} points",
    )
    return Design(
        "fig7", "Figure 7: personalization of FedADC+", "Figure 7", (panel,), (claim,),
        measures=(FINAL, *(GAIN + kind for kind in kinds)), regularizers=kinds,
    )  # fmt: skip


def _covering() -> Design:
    base = _cifar10(0.1)
    plain = next(row for row in TABLE_ROWS if row.label == FEDADC)
    covered = overlay(plain.changes, {"cohort": {"selection": "covering"}})
    rows = (
        Row("FedADC, uniform cohorts", plain.changes, 1, plain.grids, plain.settings),
        Row("FedADC, covering cohorts", covered, 0, plain.grids, plain.settings),
    )
    # 5 clients with 2 labels each would cover the ten digits only if no label came twice
    changes = {"digits": {"cohort.ratio": 0.2}}
    panel = Panel("covering", "s = 2, C = 0.1", base, rows, changes=changes, remark=WEIGHT_DECAY)
    gain = _numbers()["covering_gain"]
    claim = Claim(
        "cohorts that cover every class improve the accuracy",
        gain["source"],
        (higher(panel.name, rows[1].label, rows[0].label),),
        f"+{gain['value']} points",
    )
    return Design("covering", "Section IV-E: data-aware selection", "section IV-E", (panel,), (claim,))


AVERAGES = {"swa": {"start": 250}, "ema": {"decay": 0.8}, "lookahead": {"every": 5, "alpha": 0.5}}


def _ensembles() -> Design:
    base = overlay(_cifar10(0.1), {"ensembles": AVERAGES})
    rows = tuple(row for row in TABLE_ROWS if row.label in (FEDADC, FEDAVG))
    half = {"laptop": {"ensembles.swa.start": 50}, "digits": {"ensembles.swa.start": 30}}
    panel = Panel("ensembles", "s = 2, C = 0.1", base, rows, changes=half, remark=WEIGHT_DECAY)
    claims = tuple(
        Claim(
            f"an average over rounds ({kind}) is more accurate than {label}'s last models",
            "section IV-E",
            (Statement((Term(1, panel.name, label, f"{kind}_test_accuracy"), Term(-1, panel.name, label))),),
        )
        for label in (FEDADC, FEDAVG)
        for kind in AVERAGES
    )
    measures = (FINAL, *(f"{kind}_test_accuracy" for kind in AVERAGES))
    return Design("ensembles", "Section IV-E: temporal ensembles", "section IV-E", (panel,), claims, measures=measures)


def _links(vector: float) -> dict[str, Any]:
    """A clock: a vector of so many bytes takes about one second down and two seconds up."""
    return {
        "step_seconds": {"name": "lognormal", "median": 0.1, "sigma": 0.3},
        "down": {"name": "lognormal", "median": vector, "sigma": 0.3},
        "up": {"name": "lognormal", "median": vector / 2, "sigma": 0.3},
        "latency": 0.1,
    }


def _overlap() -> Design:
    """Links on which the momentum's download matters: a vector takes about as long as the local steps of a round."""
    base = overlay(_skewed(2).base, {"clock": _links(10e6)})
    changes = {"laptop": {"clock": _links(0.65e6)}, "digits": {"clock": _links(36e3)}}  # bytes of the model
    method = {"name": "fedadc", "beta": 0.9, "nesterov": True}
    ways = {"pull": 2, "broadcast": 3, "overlap": 0}  # with their importance
    rows = (
        Row(FEDAVG, {"method": "fedavg"}, 1),
        *(Row(f"FedADC, {way}", {"method": method, "communication": {"downlink": way}}, n) for way, n in ways.items()),
    )
    panel = Panel("overlap", "virtual time on slow links", base, rows, changes=changes)
    plain = Term(1, panel.name, FEDAVG, VIRTUAL)

    def longer(way: str, low: float, high: float) -> Statement:
        """How much longer a run takes than FedAvg's, as a share."""
        terms = (Term(1, panel.name, f"FedADC, {way}", VIRTUAL), Term(-1, panel.name, FEDAVG, VIRTUAL))
        return Statement(terms, low, high, relative_to=plain)

    hidden = "overlap hides the momentum's download: a run takes less than 1 % longer than FedAvg's"
    claims = (
        Claim(hidden, "section II-A", (longer("overlap", -math.inf, 0.01),)),
        Claim(
            "pulling the momentum costs time: a run takes longer than FedAvg's",
            "section II-A",
            (longer("pull", 0.0, math.inf),),
        ),
    )
    return Design(
        "overlap", "Section II-A: three ways to send the momentum", "section II-A", (panel,), claims,
        measures=(FINAL, VIRTUAL), x="virtual_seconds",
    )  # fmt: skip


def _designs() -> list[Design]:
    columns = _columns()
    by_name = {panel.name: panel for panel in columns}
    figure1 = [_figure1(s) for s in (2, 3, 4)]
    skewed = tuple(panel for design in figure1 for panel in design.panels)
    acceleration = "Figure 1: FedAvg, SlowMo and FedADC with s = 2, 3, 4"
    figure4 = ("c100-a01-c02", "c100-a05-c02", "c100-a01-c01", "c100-a05-c01")
    fives = {epochs: _many(500, epochs) for epochs in (2, 5, 10)}
    return [
        *figure1,
        Design("fig1", acceleration, "Figure 1", skewed, (*_order_claims("s2", "s3", "s4"), _WIDER), seeds=10),
        _figure2(),
        _table("table1", columns),
        *(_table(f"table1-{panel.name}", (panel,)) for panel in columns),
        _curves_of_table(
            "fig3", "Figure 3: convergence of nine methods, s = 2", (by_name["c10-c01"], by_name["c10-c02"])
        ),
        _curves_of_table(
            "fig4",
            "Figure 4: convergence of eight methods, Dirichlet partitions",
            tuple(by_name[name] for name in figure4),
        ),
        *(_many_clients(f"fig5-{e}", f"Figure 5: 500 clients, {e} local epochs", panel) for e, panel in fives.items()),
        _many_clients("fig6", "Figure 6: 1000 clients, 10 local epochs", _many(1000, 10)),
        _figure7(),
        _covering(),
        _ensembles(),
        _overlap(),
    ]


DESIGNS: dict[str, Design] = {design.name: design for design in _designs()}
