"""Which groups and tasks a run takes next, and when it holds back: no torch, no Temporal."""
