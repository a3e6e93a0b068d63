"""The gateway: public APIs, media, prompts, routing. Carries no torch and no weights."""
