"""The page that plays a recording in a browser: one file, with the recording in it.

player        puts the page together
columns       the recording as numbers, which `script/` reads
page, player  the templates (HTML) and their styles (CSS)
script/       what runs in the browser: `player.js` begins, `run.js` has the recording, and
              `constants.js` the sizes that several parts share
"""
