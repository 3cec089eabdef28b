"""One module a section, each with `run(context) -> Section`."""
