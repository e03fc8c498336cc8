"""A pipeline sent to a cluster: parameters checked before anything is sent, and the run followed to its end."""
