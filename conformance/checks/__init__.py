"""Checks: each holds an implementation to one clause on one case, and raises Broken with facts that name the place."""
