"""Why a plan is as it is, or why there is none; what would change it; several plans at once."""
