"""Familiar faces on the same engine: PyTorch's Dataset and DataLoader, and their kin.

Each face sets defaults and speaks the words of the code it replaces; what it hands out comes
from stores, rows and orders as everywhere else. Nothing here is imported by what lies below,
and each face imports only the packages that it is the face of.
"""
