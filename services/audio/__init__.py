"""The audio service: waveforms in, one embedding per 160 ms of sound out."""
