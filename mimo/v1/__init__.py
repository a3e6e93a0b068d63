"""Generated from protos/mimo/v1 by `make protos`. Never edited."""
