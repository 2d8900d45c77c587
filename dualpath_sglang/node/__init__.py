"""A machine of the fleet: what its processes tell others, and the agent that reads for others."""
