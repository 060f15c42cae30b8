// Lengths are pixels, unless something else is said.

/** Below this width a page is narrow: cells are smaller, and less is said at once. */
const NARROW = 600;
/** The width of a character in the pictures' type. */
const LETTER = 7.3;

/** The stage: the least width of a cell with a number. */
const WIDE_CELL = 36;
const NARROW_CELL = 30;
/** Its height: for two ranks, and the least and the most for more. */
const LOW = 110;
const HIGH = 240;
const HIGH_NARROW = 200;
const HIGHEST = 420;
/** The height of a row of a rank's box, and of the label of a message. */
const ROW_HEIGHT = 20;
const LABEL_HEIGHT = 16;
/** With more ranks than these, boxes have no values. */
const MOST_WITH_VALUES = 16;
/** Messages that are drawn at once. */
const MOST_LIT = 200;
/** Where labels are tried, as parts of the way of a message, the best place first. */
const ALONG = [0.5, 0.4, 0.6, 0.3, 0.7, 0.2, 0.8];

/** The timeline: the width of the ranks' labels, the height of the axis, and the room above it. */
const LABELS = 64;
const AXIS = 20;
const GAP_BELOW = 6;
/** Messages that are drawn at once: of more, every second, third and so on. */
const MOST_ARROWS = 3000;
/** How far beside a bar one may click, and how far a press moves before it is a drag. */
const NEAR = 4;

/** The table of ranks: the width of a digit, what a number has around it, and a cell. */
const DIGIT = 7.9;
const AROUND_NUMBER = 11;
const CELL_PADDING = 12;
/** The width of the button that shows the numbers for which there is no room. */
const OPENER = 85;
/** With more ranks than these, rows are low. */
const MOST_TALL = 4;

/** Moments whose texts are measured, the longest ones, for the height that is reserved for a text. */
const TRIED = 4;
/** Waits that the list has at first, and that each press on its button adds. */
const WAITS_AT_ONCE = 8;

/** The player: training steps that a page of a run shows at first. */
const STEPS_AT_FIRST = 3;
/** Seconds in which a whole run is played in real time. */
const REAL_SECONDS = 20;
/** What ranks do, said at once in words. */
const MOST_SAID = 6;
const MOST_SAID_NARROW = 2;
/** Moments at which heights are measured. */
const MOST_MEASURED = 400;
/** Whether the reader wants no motion. */
const IS_STILL = matchMedia("(prefers-reduced-motion: reduce)");
