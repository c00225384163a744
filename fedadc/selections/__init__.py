"""Client selection: which clients take part in a round. One module per selection, and the table of their names."""

from fedadc.selections.base import Chooser, Selection
from fedadc.selections.clusters import Clusters
from fedadc.selections.cohorts import Cohorts, cohort_of
from fedadc.selections.covering import Covering
from fedadc.selections.uniform import Uniform

SELECTIONS: dict[str, type[Selection]] = {"uniform": Uniform, "covering": Covering, "clusters": Clusters}

__all__ = ["SELECTIONS", "Chooser", "Clusters", "Cohorts", "Covering", "Selection", "Uniform", "cohort_of"]
