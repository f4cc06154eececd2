"""Copies of a run's metrics in users' tools: one file per sink, and a thread that keeps each of them off the training.

Postgres has every metric; a sink is a copy, and may lose points. `registry.py` lists the sinks, `fan_out.py` feeds
them.
"""
