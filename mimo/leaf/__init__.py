"""What the model services share: their options, how one comes to life and how it is run."""
