"""A backend over plain sockets. Read collectives.py first; PyTorch calls group.py."""
