"""Values against their annotations: the check of one value, and the base class of settings that check their fields."""
