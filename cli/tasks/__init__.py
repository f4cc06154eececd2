"""`ratchet tasks`: datasets, their admission and images, one rollout of a task, and grades anew."""

from cli.tasks.datasets import tasks_app
from cli.tasks.images import images_app
from cli.tasks.rollouts import regrade, run

tasks_app.command()(run)
tasks_app.command()(regrade)
tasks_app.add_typer(images_app)

__all__ = ["tasks_app"]
