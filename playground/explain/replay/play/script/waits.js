/** The longest waits, and the chain from one of them to the rank and the line that caused it. */
class Waits {
  /** `visit(place)` is called to go to an event. */
  constructor(run, visit) {
    this.run = run;
    this.visit = visit;
    this.list = element("ol", {class: "waits"});
    this.more = element("button", {click: () => this.showMore()}, "more");
    this.chain = element("ol", {class: "chain"});
    this.answer = element("div", {"aria-live": "polite", tabindex: -1});
    const title = element("p", {class: "title"}, run.waits.length ? "The longest waits" : run.noWaits);
    this.root = element("section", {}, title, this.list, this.more, this.answer);
    this.showMore();
  }

  showMore() {
    const from = this.list.children.length;
    this.run.waits.slice(from, from + WAITS_AT_ONCE).forEach((wait, i) => {
      const button = element("button", {click: () => this.explain(from + i)}, this.describe(wait));
      this.list.append(element("li", {}, button));
    });
    this.more.hidden = this.list.children.length >= this.run.waits.length;
  }

  describe(wait) {
    const {run} = this, place = wait.place, long = run.finish.real[place] - run.begin.real[place];
    const late = wait.late ? `, ${formatTime(wait.late)} of it until that rank came` : "";
    return `rank ${run.rankOf[place]} ${formatWait(run, wait)}: ${formatTime(long)}${late}${this.where(place)}`;
  }

  where(place) {
    const source = this.run.what(place).source;
    return source === null ? "" : `, ${formatSource(this.run, source)}`;
  }

  /** Show what caused a wait, and go there. */
  explain(index) {
    const wait = this.run.waits[index], chain = this.run.chains[index];
    this.root.closest("details").open = true;
    this.visit(wait.place);
    const links = [this.link(this.describe(wait), wait.place)];
    let end = "The chains of the longest waits are in this page; of this one there is none.";
    if (chain) {
      const {waits, work} = chain;
      for (const each of waits) links.push(this.link(this.describe(each), each.place));
      if (work) links.push(this.link(this.describeCause(work), work.place, "cause"));
      end = work ? "" : this.describeEnd(waits.at(-1) ?? wait);
    }
    this.chain.replaceChildren(...links);
    this.answer.replaceChildren(element("p", {class: "title"}, "What caused it"), this.chain, element("p", {}, end));
    this.answer.focus({preventScroll: true});
    this.answer.scrollIntoView({block: "nearest"});
  }

  link(text, place, name = "") {
    return element("li", {class: name}, element("button", {click: () => this.visit(place)}, text));
  }

  describeCause({place, from, to, isRecorded}) {
    const rank = this.run.rankOf[place], name = this.run.what(place).name;
    const what = isRecorded ? `in ${name}` : `with what is not recorded, before ${name}`;
    return `rank ${rank} was busy for ${formatTime(to - from)} ${what}${this.where(place)}`;
  }

  describeEnd(wait) {
    if (awaitedRank(this.run, wait) === null) return "What it waited for is not recorded.";
    return "Every rank was there: what it waited for is the transfer.";
  }
}
