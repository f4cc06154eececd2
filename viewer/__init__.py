"""The viewer: read-only pages about runs, groups, tasks, rollouts and steps, and their JSON twins.

It sees the store and the packages below it, and no other part of the system, so that it can show a store that no stack
uses any more.
"""
