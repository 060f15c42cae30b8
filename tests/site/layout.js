/** What the tests of layout ask of a page. */
const rectOf = (each) => each.getBoundingClientRect();
const doMeet = (a, b) => a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 1 && b.top < a.bottom - 1;

/** What is outside the window, overlaps what stands beside it, or is cut off. On a telephone, code scrolls. */
function findFaults() {
  const faults = [], say = (what, each) => faults.push(`${what}: ${each.tagName} ${each.className} ${each.textContent.slice(0, 40)}`);
  const seen = (selector) => [...document.querySelectorAll(selector)].filter((each) => each.checkVisibility() && rectOf(each).width);
  if (document.documentElement.scrollWidth > innerWidth) faults.push("the page scrolls sideways");
  const parts = seen("#contents, main, aside, header > :not(.skip), main > *, aside > *, .code > *, .buttons > *").map((each) => [each, rectOf(each)]);
  const last = new Map();
  for (const [each, place] of parts) {
    if (place.right > innerWidth + 1 || place.left < -1) say("outside", each);
    const before = last.get(each.parentElement);
    if (before && doMeet(before, place)) say("overlaps", each);
    last.set(each.parentElement, place);
  }
  for (const each of seen(innerWidth > 640 ? ".code pre, main .scroll" : "main > .scroll")) {
    if (each.scrollWidth > each.clientWidth + 1) say("cut off", each);
  }
  return faults;
}

/** Step each player to its end: where it begins, its heights, and the moments at which a label covers a rank or another. */
function stepAll() {
  return [...document.querySelectorAll(".player")].map((player) => {
    const [forward, position, status] = ["[name=forward]", "[name=position]", ".status"].map((each) => player.querySelector(each));
    const first = status.textContent.split(".")[0], heights = new Set(), collisions = [];
    let labels = 0;
    forward.focus({preventScroll: true});
    for (let before = null; before !== position.value;) {
      before = position.value;
      heights.add(rectOf(player).height);
      const texts = [...player.querySelectorAll(".label")].filter((each) => each.textContent).map(rectOf);
      const places = [...texts, ...[...player.querySelectorAll(".box")].map(rectOf)];
      if (texts.some((one, i) => places.slice(i + 1).some((other) => doMeet(one, other)))) collisions.push(before);
      labels += texts.length;
      forward.click();
    }
    return {first, heights: [...heights], collisions, labels};
  });
}
