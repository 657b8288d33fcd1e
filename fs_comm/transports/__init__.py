"""Roads between ranks behind one interface."""
