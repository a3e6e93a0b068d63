"""The OpenAI-compatible REST face: requests in, GenerationRequest out; events in, JSON out."""
