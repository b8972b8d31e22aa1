"""Ranks come up, stay together and end: nothing here knows what they train.

launcher.py    starts the local ranks, watches them, says which one died
startup.py     how ranks come together before the first step
peers.py       what they tell each other afterwards
lock.py        one job at a time in a run folder

Import the modules directly: the CLI needs `launcher` at once and none of the others.
"""
