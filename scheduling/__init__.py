"""Select the groups and tasks that a run takes next, and hold back if needed: no torch, no Temporal."""
