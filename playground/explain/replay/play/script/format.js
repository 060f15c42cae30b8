/** A number with up to four digits; very large and very small ones with their power of ten. */
function formatNumber(number) {
  const size = Math.abs(number);
  const needsPower = size !== 0 && Number.isFinite(number) && (size >= 1e5 || size < 1e-3);
  if (needsPower) return number.toExponential(1).replace("e+", "e");
  return String(Number(number.toPrecision(4)));
}

const TIMES = [["s", 1e9], ["ms", 1e6], ["µs", 1e3], ["ns", 1]];

function formatTime(nanoseconds) {
  return Number.isFinite(nanoseconds) ? formatUnit(nanoseconds, TIMES) : "never";
}

const SIZES = [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10], ["B", 1]];

function formatBytes(bytes) {
  return formatUnit(bytes, SIZES);
}

/** An amount in the largest of these units of which there is at least one, or in the smallest. */
function formatUnit(amount, units) {
  const [unit, size] = units.find(([, least]) => amount >= least) ?? units.at(-1);
  return `${formatNumber(amount / size)} ${unit}`;
}

/** The first of these values, as many as are asked for. */
function formatValues(values, most = 4) {
  return `[${values.slice(0, most).map(formatNumber).join(", ")}${values.length > most ? ", …" : ""}]`;
}

/** What a message carries: its values if they are known, and its size. */
function formatCargo(run, place) {
  const values = run.values(place), bytes = formatBytes(run.what(place).bytes);
  return values ? `${bytes} ${formatValues(values)}` : bytes;
}

/** The rank of the event that this one's wait is for, or null. */
function awaitedRank(run, wait) {
  return wait.awaited === null ? null : run.rankOf[wait.awaited];
}

/** What the causes of waits say of the rank that is waited for. */
const CAUSES = {
  "late sender": ", which has not sent yet", "late receiver": ", which does not receive yet",
  "last to come": ", which comes last", transfer: ": message on its way", unknown: "",
};

/** Why a rank waits, in a few words. `hasCome`: whether the other end of its message has been called. */
function formatWait(run, wait, hasCome = false) {
  const rank = awaitedRank(run, wait), {cause} = wait;
  if (rank === null) return "waits";
  return `waits for rank ${rank}${CAUSES[hasCome && cause !== "last to come" ? "transfer" : cause]}`;
}

/** What a rank is doing, in a few words. */
function formatDoing(run, clock, rank, time) {
  const [place] = run.stack(clock, rank, time);
  if (place === undefined) return "";
  const {kind, name, peer} = run.what(place);
  const wait = run.waits[run.waitOf.get(place)];
  if (run.isAlone(place)) return `${name} of this rank only`;
  if (wait) {
    const hasCome = wait.awaited !== null && run.begin[clock][wait.awaited] <= time;
    const why = formatWait(run, wait, hasCome);
    return kind === "wait" ? why : `${name}: ${why}`;
  }
  if (kind === "bucket") return `all_reduce of ${name}`;
  if (kind === "send") return `${name} to rank ${peer}`;
  if (kind === "receive") return `${name} from ${peer === null ? "any rank" : `rank ${peer}`}`;
  return name;
}

function formatSource(run, place) {
  const {file, line} = run.sources[place];
  return `${file}:${line}`;
}

/** The address of the line on a page with its code, if there is one. */
function addressOf(run, place) {
  const {file, line} = run.sources[place];
  return run.pages[file] && `${run.pages[file]}${line}`;
}

/** One line of the program, without the space around it. */
function lineOf(run, place) {
  const {file, line} = run.sources[place];
  return (run.texts[file] || "").split("\n")[line - 1]?.trim() ?? "";
}

/** An element with these attributes, properties that are functions, and children. */
function element(tag, attributes = {}, ...children) {
  const isSvg = ["svg", "g", "rect", "path", "circle", "text", "title", "defs", "marker"].includes(tag);
  const made = isSvg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") made.addEventListener(name, value); else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

/** The moments with the longest of these texts, each text once. */
function longest(moments, text) {
  const when = new Map(moments.map((time) => [text(time), time]));
  return [...when.keys()].sort((a, b) => b.length - a.length).slice(0, TRIED).map((each) => when.get(each));
}

/** Give elements the most height that they have at these tries, so that what is below them stays where it is. */
function reserve(elements, tries, show) {
  for (const each of elements) each.style.height = each.style.minHeight = "";
  const most = elements.map(() => 0);
  for (let i = 0; i < tries; i++) {
    show(i);
    elements.forEach((each, index) => { most[index] = Math.max(most[index], each.getBoundingClientRect().height); });
  }
  // In a table a height is the least that a cell has; elsewhere it would be the most, too.
  elements.forEach((each, index) => {
    const isCell = getComputedStyle(each).display === "table-cell";
    each.style[isCell ? "height" : "minHeight"] = `${most[index]}px`;
  });
}

/** Write a text where another stands; nothing is done where it stands already. */
function write(place, text) {
  if (place.textContent !== text) place.textContent = text;
}
