"""Who takes part in a round: one file per selection, and the table of their names."""

from fedadc.federation.selection.base import Chooser, Selection, Uniform, cohort_of, hand_out_order
from fedadc.federation.selection.clusters import Clusters
from fedadc.federation.selection.covering import Covering

SELECTIONS: dict[str, type[Selection]] = {"uniform": Uniform, "covering": Covering, "clusters": Clusters}

__all__ = ["SELECTIONS", "Chooser", "Clusters", "Covering", "Selection", "Uniform", "cohort_of", "hand_out_order"]
