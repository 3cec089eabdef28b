"""Linear layers in the form that is fastest where they run."""
