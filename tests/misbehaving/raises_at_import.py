"""Cannot be imported."""

raise RuntimeError("no driver\nwas found")
