"""The public gRPC face: mimo.v1.Gateway in terms of the pipeline's own types."""
