"""From a client's bytes or URL to a plan, and from a plan to pixels and samples."""
