"""Layers with a state instead of keys and values: convolution windows and recurrent states of the step's rows."""
