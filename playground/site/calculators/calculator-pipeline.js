"use strict";
{
const { digits, plain, count, start } = Calculators;

/** What stage s does, in order: +m is the forward of microbatch m, -m its backward; microbatches count from 1. */
const ORDERS = {
  "naive": (s, stages, m) => Array.from({ length: m }, (_, each) => [each + 1, -each - 1]).flat(),
  "gpipe": (s, stages, m) => [...count(1, m), ...count(1, m).map((each) => -each)],
  "1f1b": (s, stages, m) => {
    const ahead = Math.min(m, stages - 1 - s);
    const pairs = count(ahead + 1, m).flatMap((each) => [each, ahead - each]);
    return [...count(1, ahead), ...pairs, ...count(m - ahead + 1, m).map((each) => -each)];
  },
};

/** What each stage does in each slot, 0 where it idles: a forward takes one slot and a backward two. A forward follows
 * that of the stage before, a backward that of the stage after. */
function fillSlots(schedule, stages, microbatches) {
  const orders = count(0, stages - 1).map((s) => ORDERS[schedule](s, stages, microbatches));
  const slots = orders.map(() => []), ends = new Map();
  while (orders.some((order) => order.length)) {
    orders.forEach((order, s) => {
      const [next] = order, source = next > 0 ? s - 1 : s + 1;
      const ready = source < 0 || source === stages ? 0 : ends.get(`${source} ${next}`);
      if (!next || ready === undefined) return;
      while (slots[s].length < ready) slots[s].push(0);
      slots[s].push(...next > 0 ? [next] : [next, next]);
      ends.set(`${s} ${next}`, slots[s].length);
      order.shift();
    });
  }
  const length = Math.max(...slots.map((row) => row.length));
  return slots.map((row) => Array.from({ length }, (_, at) => row[at] ?? 0));
}

function countHeld(order) {
  let held = 0, most = 0;
  for (const each of order) most = Math.max(most, held += Math.sign(each));
  return plain(most);
}

function pipeline({ stages, microbatches, schedule }) {
  const rows = {};
  for (const name of Object.keys(ORDERS)) {
    const length = fillSlots(name, stages, microbatches)[0].length, bubble = 1 - 3 * microbatches / length;
    const held = [0, stages - 1].map((s) => countHeld(ORDERS[name](s, stages, microbatches)));
    rows[name] = [plain(length), [bubble, `${digits(100 * bubble)} %`], ...held];
  }
  const [slots, bubble, held] = rows[schedule].map(([, text]) => text);
  const idle = `stages idle for ${bubble} of ${slots} slots`;
  return {
    rows,
    says: `${schedule}: ${idle}; the first one holds ${held} of ${microbatches} microbatches.`,
    draw: (room, width) => drawSlots(fillSlots(schedule, stages, microbatches), width),
  };
}

/** The drawing, in pixels: a row for each stage, with its name and a box for each forward and backward. */
const ROW = 26, SLOTS_AT = 60, BOX_TOP = 2, BOX_HEIGHT = 24, BASELINE = 18, MARGIN = 2;
/** The most width of a slot, and the least of a box with a number that can be read. */
const WIDEST = 26, READABLE = 18;
/** The key below it: a box and a text for forward, and for backward. */
const KEY_TOP = 6, KEY_BOX = 14, KEY_TEXT = 20, KEY_WIDTH = 92, KEY_HEIGHT = 24;

/** In the width that there is: with the numbers of microbatches, as long as they can be read. */
function drawSlots(slots, width) {
  const slot = Math.min(WIDEST, (width - SLOTS_AT - MARGIN) / slots[0].length);
  const rows = slots.map((row, s) => {
    const texts = row.map((each) => each ? `${each > 0 ? "F" : "B"}${Math.abs(each) - 1}` : ".");
    const boxes = texts.map((text, at) => text === "." || text === texts[at - 1] ? "" : drawBox(text, at, s, slot));
    const name = `<text x="0" y="${ROW * s + BASELINE}">stage ${s}</text>`;
    return `<g data-slots="${texts.join(" ")}">${name}${boxes.join("")}</g>`;
  });
  const bottom = ROW * slots.length, key = ["forward", "backward"].map((name, place) => {
    const x = SLOTS_AT + KEY_WIDTH * place, box = `x="${x}" y="${bottom + KEY_TOP}" width="${KEY_BOX}" height="${KEY_BOX}"`;
    return `<rect class="${name[0].toUpperCase()}" ${box}/><text x="${x + KEY_TEXT}" y="${bottom + BASELINE}">${name}</text>`;
  });
  return [SLOTS_AT + MARGIN + slot * slots[0].length, bottom + KEY_HEIGHT, rows.join("") + key.join("")];
}

/** The box of a forward, of one slot, or of a backward, of two, with its name in the middle. */
function drawBox(text, at, stage, slot) {
  const [kind] = text, taken = kind === "B" ? 2 : 1, gap = Math.min(1, slot / 8);
  const middle = SLOTS_AT - 0.5 + slot * (at + taken / 2);
  const place = `x="${SLOTS_AT + slot * at}" y="${ROW * stage + BOX_TOP}"`;
  const size = `width="${slot * taken - gap}" height="${BOX_HEIGHT}" stroke-width="${gap}"`;
  const name = `<text class="middle" x="${middle}" y="${ROW * stage + BASELINE}">${text}</text>`;
  return `<rect class="${kind}" ${place} ${size}/>${slot * taken < READABLE ? "" : name}`;
}

start("pipeline", pipeline);
}
