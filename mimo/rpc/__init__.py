"""gRPC as every process uses it: one server scaffold, one channel, one translation of errors."""
