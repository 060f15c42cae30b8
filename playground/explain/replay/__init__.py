"""What has happened? A recorded run.

Begin with `record/recording.py`: an event, a rank's events, a run's. Everything here makes a
recording, or is made of one.

see      `--see FILE`: records the ranks of a command
files    a recording as a file, in the format of its ending

record   records the ranks, and reads what they have written
analyse  what belongs together, waits, logical time
render   pictures and text
play     the page that plays it
"""
