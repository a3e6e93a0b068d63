"""Typed clients of the model services: the only code of the gateway that speaks their protocol."""
