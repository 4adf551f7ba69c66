"""How the miniature's detector is made from nothing: `noctowl pretrain-tiny`. See docs/miniature.md."""

from noctowl.pretrain.stages import PretrainSettings, main, make

__all__ = ["PretrainSettings", "main", "make"]
