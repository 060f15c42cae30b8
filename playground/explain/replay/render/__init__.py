"""A recording as a picture and as text. A picture is a scene first, and then SVG.

scene        what a figure shows, laid out; colours
bands, bars  parts of a scene
timeline     the figure of any recording
svg          a scene as SVG
chrome       a recording as a Chrome trace
text_report  who waited for whom, and why
"""
