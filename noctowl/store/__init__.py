"""Feature store: tokens, boxes and objectness of images on disk, computed once per base model. See docs/features.md."""

from noctowl.store.accuracy import background_error, measure, similarity_error
from noctowl.store.build import BuildReport, build, check_room
from noctowl.store.folder import FeatureStore, Room
from noctowl.store.maintain import info, prune, verify
from noctowl.store.reader import FeatureReader
from noctowl.store.spec import Spec, describe
from noctowl.store.tables import print_info, print_prune, print_verify
from noctowl.store.texts import TextStore

__all__ = [
    "BuildReport",
    "FeatureReader",
    "FeatureStore",
    "Room",
    "Spec",
    "TextStore",
    "background_error",
    "build",
    "check_room",
    "describe",
    "info",
    "measure",
    "print_info",
    "print_prune",
    "print_verify",
    "prune",
    "similarity_error",
    "verify",
]
