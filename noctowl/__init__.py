"""noctowl: fine-grained open-vocabulary detection with OWL-ViT and OWLv2."""

__version__ = "0.1.0"
