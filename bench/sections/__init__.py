"""One module per section, each with `run(context) -> Section`."""
