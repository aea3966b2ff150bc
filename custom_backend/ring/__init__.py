"""A backend out of plain sockets. Begin with collectives.py; PyTorch begins with group.py."""
