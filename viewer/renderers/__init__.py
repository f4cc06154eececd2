"""Views of a rollout that belong to its task: a file per family of tasks, or a user's own function."""
