"""The drawing office: numbers in, a plan out. Imports no framework.

``profile`` is what was measured, ``timeline`` plays one step with given fates, ``solve`` searches the fates, ``plan`` is
the answer with its reasons. Measuring and applying belong to the frameworks' own rooms.
"""
