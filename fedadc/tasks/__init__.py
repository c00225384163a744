"""Tasks: what the labels of a data set are and how predictions are judged. One file per task."""

from fedadc.errors import unknown
from fedadc.tasks.base import Sums, Task, added
from fedadc.tasks.classification import Classification
from fedadc.tasks.regression import Regression, Target

TASKS: dict[str, type[Task]] = {"classification": Classification, "regression": Regression}
EXTRA_METRICS = tuple(name for task in TASKS.values() for name in task.extra_metrics)
SCORES = tuple(task.score for task in TASKS.values())
JUDGED_BY = tuple(  # the first of them that a record has
    prefix + score for prefix in ("validation_", "test_", "validation_personal_", "personal_") for score in SCORES
)
LOWER_IS_BETTER = tuple({name: None for task in TASKS.values() for name in task.lower_is_better})


def require_task(task: str | None) -> None:
    """Refuse a name that is no task; None: what the labels look like."""
    if task is not None and task not in TASKS:
        raise unknown("task", task, TASKS)


__all__ = [
    "EXTRA_METRICS", "JUDGED_BY", "LOWER_IS_BETTER", "SCORES", "TASKS",
    "Classification", "Regression", "Sums", "Target", "Task", "added", "require_task",
]  # fmt: skip
