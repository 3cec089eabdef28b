"""Generated from proto/wire/*.proto by `make proto`. Never edited by hand."""
