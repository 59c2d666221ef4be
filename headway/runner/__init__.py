"""Floor 6: one step on one device, from plan to readback."""
