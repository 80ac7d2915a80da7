// The sections of the page. What is not known is left out.
const chosen = { run: 0, start: "all", epoch: "all", rank: "all" };
const nameOf = (run, k) => [found.runs.some(one => one.folder_path !== run.folder_path) ? run.folder_path : "", run.name].filter(Boolean).join(": ") || run.folder_path || `loader ${k + 1}`;
const ofStart = one => chosen.start === "all" || one.start + 1 == chosen.start;
const ofEpoch = one => chosen.epoch === "all" || one.epoch == chosen.epoch;

function pick(name, options) {
  const node = el("select", { "data-filter": name, onchange: event => { chosen[name] = event.target.value; show(); } },
    ...options.map(([value, text]) => el("option", { value }, text)));
  if (!options.some(([value]) => String(value) === String(chosen[name]))) chosen[name] = options[0][0];
  node.value = chosen[name];
  return el("label", {}, el("span", { class: "dim" }, name + " "), node);
}

const age = last => LIVE ? `${duration(found.made - last)} ago` : `${duration(found.made - last)} before this report`;
function stateOf(now, last = now.last) {
  // A shape, words and a colour: none of them alone.
  if (now.state === "running") return ["●", "running", "info", `last step ${age(last)}`];
  if (now.state === "quiet") return ["◐", "no step", "mind", `last step ${age(last)}`];
  if (now.state === "finished") return ["✓", `epoch ${now.epoch} complete`, "good", `last step ${age(last)}`];
  const gone = now.by_rank.filter(one => one.state === "stopped").length, of = now.by_rank.length;
  return ["■", gone < of ? `${gone} of ${of} ranks stopped` : "stopped", "mind", `last step ${age(last)}`];
}
function badge(now) {
  const [shape, words, kind, when] = stateOf(now);
  return el("span", { class: `state ${kind}`, id: "state" }, `${shape} ${words} · ${when}`);
}

function sideBySide() {
  const units = [...new Set(found.runs.map(run => unitOf(run.now) + "s"))].sort(), one = units.length === 1;
  const head = ["run", ["state", "text"], "epoch", "progress", one ? `${units[0]}/s` : "each second", "tokens/s", "waiting", "steps", "lost", "repeated", "ranks", "workers", "batch"];
  const sum = (run, key) => run.epochs.reduce((total, one) => total + one[key], 0);
  const rows = found.runs.map((run, k) => {
    const now = run.now, [shape, words, kind, when] = stateOf(now);
    return [el("button", { class: "link", onclick: () => { chosen.run = k; show(); } }, nameOf(run, k)), [`${shape} ${words}, ${when}`, `text ${kind}`], number(now.epoch), now.progress == null ? "" : percent(now.progress),
      now.rows_per_second == null ? "" : figure(now.rows_per_second) + (one ? "" : ` ${unitOf(now)}s`), now.tokens_per_second == null ? "" : short(now.tokens_per_second), now.waited == null ? "" : percent(now.waited),
      number(run.steps), [number(sum(run, "never")), sum(run, "never") ? "bad" : ""], [number(sum(run, "repeated")), sum(run, "repeated") ? "bad" : ""], number(now.ranks), now.workers == null ? "" : number(now.workers), number(now.batch)];
  });
  const empty = head.map((_, i) => rows.every(row => row[i] === ""));
  const lines = found.runs.map((run, k) => {
    const begin = least(run.passes.map(one => one.began)), all = run.speed.filter(one => one.rank <= 0);
    return { name: nameOf(run, k), colour: colour(k), dash: dash(k), points: all.flatMap(one => one.points.map(p => [p[0] - begin, p[1] * (one.rank < 0 ? 1 : one.ranks)])).sort((a, b) => a[0] - b[0]) };
  });
  return section("runs", "Side by side", table("side-by-side", head.filter((_, i) => !empty[i]), rows.map(row => row.filter((_, i) => !empty[i]))),
    el("h3", {}, `${units.join(" or ")} per second, by the time since each began`),
    chart("runs-svg", lines, { x: v => duration(v), y: short }), legend(lines.map((line, k) => [line.name, "line", k, line.dash])),
    note(found.runs.some(run => run.now.ranks > 1) ? "Of several ranks: the first, times their number." : null));
}

const unitOf = now => now.packing == null ? "row" : "sequence";  // what a batch has

function dashboard(run) {
  const now = run.now, alive = now.state === "running" || now.state === "quiet", when = alive ? "now" : "at the end";
  const text = now.progress == null ? `epoch ${now.epoch}: its length is not known before its end` : `epoch ${now.epoch}: ${now.progress_at_least ? "at least " : ""}${percent(now.progress)}${run.epochs.some(one => one.leases) ? " leased" : ""}` + (now.eta == null ? "" : `, about ${duration(now.eta)} left`);
  const each = now.batch / now.ranks, unit = unitOf(now);
  return section("now", alive ? "Now" : now.state === "finished" ? "At the end" : "When it stopped",
    now.progress == null ? note(text) : progressBar("progress", now.progress, text),
    tiles([
      now.rows_per_second != null && [`${unit}s/s ${when}`, figure(now.rows_per_second)],
      now.tokens_per_second != null && [`tokens/s ${when}` + (now.tokens_are_padded ? ", with padding" : ""), short(now.tokens_per_second)],
      now.waited != null && [`of the time waiting for data, ${when}`, percent(now.waited), now.waited > .2 ? "mind" : ""],
      now.phase != null && ["phase of the schedule", now.phase],
      now.eta != null && ["to the end of the epoch", duration(now.eta)],
      now.batch != null && [`${unit}${now.batch === 1 ? "" : "s"} in a global batch` + (now.ranks > 1 ? `, ${figure(each)} of each rank` : ""), number(now.batch)],
      ["rank" + (now.ranks === 1 ? "" : "s"), number(now.ranks)],
      now.workers != null && ["worker" + (now.workers === 1 ? "" : "s") + (now.ranks > 1 ? " of each rank" : ""), number(now.workers)],
      now.padding != null && ["of the tokens are padding", percent(now.padding)],
      now.packing != null && ["packing efficiency", percent(now.packing)],
      now.blocks_ready != null && ["of the blocks ready in time", percent(now.blocks_ready)],
    ]),
    note(now.rows_per_second == null ? "Speeds are recorded from the first second on, and then every five." : null),
    now.missing.length ? el("p", { class: "mind" }, `No record of rank ${now.missing.join(", ")} of ${now.ranks} in this pass.`) : null,
    stages(now), sources(run), now.by_rank.length > 1 ? ranks(now) : null);
}
const WORK = { read: "read", map: "functions (map, filter, tokenize …)", combine: "mix, pack and group", collate: "collate", transport: "transport from workers", other: "not measured apart" };
function stages(now) {
  const list = Object.entries(now.stages), total = list.reduce((sum, [, seconds]) => sum + seconds, 0), width = wide(), node = board("stages-svg", width, 30);
  if (!total) return null;
  const words = name => name === "combine" && !now.stages.read ? "read, mix, pack and group" : WORK[name] || name;
  let at = 0;
  list.forEach(([name, seconds], k) => {
    const w = seconds / total * width, text = `${words(name)} ${percent(seconds / total)}`;
    node.append(draw("rect", { class: "stage", x: at, y: 2, width: Math.max(.5, w - 1), height: 24, fill: colour(k) }, `${text}: ${seconds.toFixed(2)} s`));
    if (w > 7 * text.length) node.append(label(at + 6, 18, text, "start", on(k)));
    at += w;
  });
  return el("div", { id: "stages" }, el("h3", {}, "Work by stage"), node, legend(list.map(([name, seconds], k) => [`${words(name)} ${seconds.toFixed(2)} s, ${percent(seconds / total)}`, "box", k])),
    note(`Seconds of work in the last start, from before its first batch on, over all workers and ranks; it ran for ${duration(now.seconds / now.by_rank.length)}.` + (now.waited_since_start == null ? "" : ` The model waited ${percent(now.waited_since_start)} of that time.`)));
}
function changed(list) {
  const last = list[list.length - 1], weights = Object.entries(last.weights).map(([name, share]) => `${name} ${percent(share)}`).join(", ");
  return `Weights set during the run: ${weights}, from step ${number(last.step)} on` + (last.phase == null ? "" : `, in phase ${last.phase}`) + (list.length > 1 ? `. This is the last of ${number(list.length)} changes.` : ".");
}
function sources(run) {
  const now = run.now;
  if (!now.sources.length) return null;
  const weighted = now.sources.some(one => one.weight != null), again = now.sources.some(one => one.consumed > one.rows);
  const width = wide(), node = board("sources-svg", width, 30);
  let at = 0;
  now.sources.forEach((one, k) => {
    const w = (one.share || 0) * width;
    node.append(draw("rect", { class: "source", x: at, y: 2, width: Math.max(.5, w - 1), height: 24, fill: colour(k) }, `${one.name}: ${percent(one.share || 0)}`));
    if (w > 7 * one.name.length + 12) node.append(label(at + 6, 18, one.name, "start", on(k)));
    at += w;
  });
  const head = ["source", "share of the rows", weighted ? (now.phase == null ? "weight" : "weight in this phase") : null, "rows drawn", "rows of it", again ? "times iterated" : null];
  return el("div", { id: "sources" }, el("h3", {}, `Sources in epoch ${now.epoch}`), node, legend(now.sources.map((one, k) => [one.name, "box", k])),
    table("source-table", head.filter(Boolean), now.sources.map(one => [one.name, one.share == null ? "" : percent(one.share), weighted ? (one.weight == null ? "" : percent(one.weight)) : null,
      number(one.consumed), number(one.rows), again ? figure(one.consumed / one.rows) : null].filter(value => value != null))),
    run.weight_changes.length ? note(changed(run.weight_changes)) : null,
    note(weighted ? "Weights are of what is mixed: if sources are packed or filtered before, their rows have other shares." : null),
    note(again ? "A mix draws from a source again as its weight requires. The proof does not call such rows repeated." : null));
}
function ranks(now) {
  const speeds = now.by_rank.some(one => one.rows_per_second != null);
  return el("div", { id: "ranks" }, el("h3", {}, "Ranks"), table("rank-table", ["rank", ["state", "text"], ...(speeds ? [`${unitOf(now)}s/s`, "waiting"] : []), "steps", ["last step", "text"], ["machine", "text"]],
    now.by_rank.map(one => {
      const [shape, words, kind] = stateOf({ ...now, state: one.state === "stopped" ? now.state : one.state, by_rank: [] }, one.last);
      return [number(one.rank), [`${shape} ${words}`, `text ${kind}`], ...(speeds ? [one.rows_per_second == null ? "" : figure(one.rows_per_second), one.waited == null ? "" : percent(one.waited)] : []),
        number(one.steps), [hour(one.last), "text"], [one.machine, "text"]];
    }), "wide"));
}

function overview(run) {
  const data = (run || found).data, proof = run && run.epochs;
  const sum = key => proof.reduce((total, one) => total + one[key], 0);
  const over = run && proof.every(one => one.complete), alive = run && ["running", "quiet"].includes(run.now.state);
  const words = run && (!run.exact ? "✕ not exact" : over ? "✓ exact" : alive ? "exact so far" : "exact up to the last step");
  const all = over && !["dropped", "excluded", "filtered", "skipped"].some(sum);
  return el("section", { id: "overview" }, run ? el("h2", {}, "Proof") : null, tiles([
    run && [all ? "every row was delivered once" : run.exact ? "no row is lost or repeated" : "rows were lost or repeated, or are not recorded", words, !run.exact ? "bad" : over ? "good" : ""],
    run && ["lost / repeated", number(sum("never")) + " / " + number(sum("repeated")), sum("never") + sum("repeated") ? "bad" : ""],
    run && ["step" + (run.steps === 1 ? "" : "s"), number(run.steps)], run && ["start" + (run.starts === 1 ? "" : "s"), number(run.starts)],
    run && run.world_sizes.length > 1 && ["ranks over time", run.world_sizes.join(" → ")],
    data && ["row" + (data.rows === 1 ? "" : "s") + (run ? " in an epoch" : ""), number(data.rows)], data && ["file" + (data.files === 1 ? "" : "s"), number(data.files)], data && data.bytes != null && ["on disk", size(data.bytes)],
  ]), ...(run ? run.problems.map(text => el("p", { class: "bad" }, "✕ " + text)) : []));
}

function consumption(run) {
  const width = wide(), every = run.epochs.filter(ofEpoch), epochs = every.slice(-60), small = width < 500;
  const node = board("consumption-svg", width, 30 * epochs.length + 20), left = small ? 58 : 70, span = width - left - 10, starts = new Set();
  const ends = run.now.progress != null || epochs.every(one => one.complete), mixed = run.now.sources.some(one => one.weight != null);
  let again = false, wrong = false, rest = false;
  epochs.forEach((one, k) => {
    const y = 30 * k, x = p => left + (one.rows ? p / one.rows : 0) * span;
    node.append(label(0, y + 16, "epoch " + one.epoch), draw("rect", { x: left, y, width: span, height: 22, fill: "var(--line)" }, `epoch ${one.epoch}: ${number(one.rows)} ${run.unit}`));
    for (const piece of one.pieces) {
      if (!ofStart(piece)) continue;
      starts.add(piece.start);
      again = again || piece.again;
      const w = Math.max(.6, Math.min(x(piece.to), left + span) - x(piece.from));
      const title = `${piece.again ? "delivered again later: " : ""}positions ${number(piece.from)} to ${number(piece.to - 1)}, start ${piece.start + 1}, ${plural(piece.ranks, "rank")}` + (piece.share < 1 ? `, ${percent(piece.share)} of them` : "");
      node.append(draw("rect", { class: piece.again ? "again" : "piece", x: x(piece.from), y: piece.again ? y + 17 : y, width: w,
        height: piece.again ? 6 : 17, fill: piece.again ? hatched(node, piece.start) : colour(piece.start), "fill-opacity": piece.again ? 1 : .3 + .6 * piece.share }, title));
      if (!piece.again && w > 50) node.append(label(x(piece.from) + 5, y + 13, `start ${piece.start + 1}`, "start", on(piece.start)));
    }
    rest = rest || one.pending || one.dropped;
    for (const p of one.exact ? [] : one.examples) { wrong = true; node.append(cross(x(p), y + 11, `position ${number(p)}: lost or repeated`)); }
  });
  node.append(label(left, 30 * epochs.length + 12, "position 0"), label(width - 10, 30 * epochs.length + 12, mixed ? "all rows of its sources" : ends ? "end of the epoch" : "last position so far", "end"));
  const names = { rows: run.unit, never: "lost", pending: "to come", again: "delivered again", once: epochs.some(one => one.filtered || one.skipped) ? "consumed once" : "delivered once", excluded_outputs: "outputs excluded" };
  const keys = ["rows", "once", "never", "repeated", "pending", "filtered", "dropped", "skipped", "excluded", "excluded_outputs", "again", "steps"].filter(key => !["filtered", "dropped", "skipped", "excluded", "excluded_outputs", "again"].includes(key) || epochs.some(one => one[key]));
  const leased = epochs.some(one => one.leases) ? Object.entries({ leased: "leased", acknowledged: "acknowledged", rejected: "of these rejected", out: "still out", returned: "returned" }) : [];
  const body = epochs.map(one => [String(one.epoch), ...keys.map(key => [number(one[key]), (key === "repeated" || key === "never") && one[key] ? "bad" : ""]),
    ...leased.map(([key]) => one.leases ? number(one.leases[key]) : ""),
    one.complete ? ["✓ complete", "good"] : one.exact ? "exact so far" : ["✕ not exact", "bad"]]);
  return section("consumption", `Consumed ${run.unit}`, node,
    legend([...[...starts].sort((a, b) => a - b).slice(0, 12).map(k => [`start ${k + 1}`, "box", k]), ...(again ? [["delivered, and again after a resume", "hatch", 0]] : []), ...(rest ? [["to come, or dropped", "box", "var(--line)"]] : []), ...(wrong ? [["lost or repeated", "cross", 0]] : [])]),
    note((every.length > epochs.length ? `The last ${epochs.length} of ${number(every.length)} epochs. ` : "") + (mixed ? "Each bar is an epoch: the rows of its sources that it has drawn. A mix may end before all are." : "Each bar is an epoch, from its first position to its last.")
      + (leased.length ? " It has what was leased: what was returned comes again." : epochs.some(one => one.excluded || one.filtered || one.skipped) ? " What was left out on the way has no mark." : "")),
    table("epochs", ["epoch", ...keys.map(key => names[key] || key), ...leased.map(([, title]) => title), ""], body));
}

function timeline(run) {
  const list = run.passes.filter(one => ofStart(one) && ofEpoch(one)), numbers = [...new Set(list.map(one => one.start))], shown = numbers.slice(-60);
  const width = wide(), left = 58, span = width - left - 10, node = board("timeline-svg", width, 26 * shown.length + 22);
  const begin = least(list.map(one => one.began)), end = Math.max(begin + 1, most(list.map(one => one.last)));
  const x = t => left + (t - begin) / (end - begin) * span;
  shown.forEach((start, k) => {
    const own = list.filter(one => one.start === start), first = own[0], from = least(own.map(one => one.began)), to = most(own.map(one => one.last)), kept = own.some(one => one.kept);
    const y = 26 * k, w = Math.max(3, x(to) - x(from)), epochs = [...new Set(own.map(one => one.epoch))];
    const words = `${plural(first.ranks, "rank")}, epoch${epochs.length > 1 ? "s" : ""} ${least(epochs)}${epochs.length > 1 ? ` to ${most(epochs)}` : ""}`;
    node.append(label(0, y + 15, "start " + (start + 1)));
    node.append(draw("rect", { class: "start", x: x(from), y, width: w, height: 19, rx: 2, fill: colour(start), "fill-opacity": kept ? .9 : .35 },
      `start ${start + 1}: ${words}, global batch ${number(first.batch)}, ${first.how === "loaded" ? "a state was loaded" : first.how === "fresh" ? "from the beginning" : "continued"}\n${clock(from)} to ${clock(to)}, ${duration(to - from)}` + (kept ? "" : "\nnot in the weights: a later start resumed before it")));
    for (const one of own.length <= 60 ? own.slice(1) : []) if (one.epoch !== first.epoch) node.append(draw("line", { class: "epoch", x1: x(one.began), x2: x(one.began), y1: y + 1, y2: y + 18, stroke: "var(--card)", "stroke-width": 1.5 }, `epoch ${one.epoch} began`));
    if (w > 7 * words.length) node.append(label(x(from) + 5, y + 14, words, "start", kept ? on(start) : "var(--ink)"));
  });
  const when = t => width < 600 ? hour(t) : clock(t);
  node.append(label(left, 26 * shown.length + 14, when(begin)), label(width - 10, 26 * shown.length + 14, when(end), "end"));
  return section("timeline", "Starts and ranks", list.length ? node : note("No start matches the filters."),
    note((numbers.length > shown.length ? `The last ${shown.length} of ${number(numbers.length)} starts. ` : "") + (run.world_sizes.length > 1 ? `Ranks over time: ${run.world_sizes.join(" → ")}. ` : "") + "Lines in a bar are the beginnings of epochs. A pale bar is no longer in the weights. Times are those of the machines' clocks."));
}

function speed(run) {
  const list = run.speed.filter(one => ofStart(one) && (chosen.rank === "all" || one.rank == chosen.rank || one.rank < 0));
  const name = one => `start ${one.start + 1}` + (one.rank < 0 ? `, all ${one.ranks} ranks` : one.ranks > 1 ? `, rank ${one.rank}` : "");
  const curves = k => list.map(one => ({ name: name(one), colour: colour(one.start), dash: one.rank < 0 ? "" : dash(one.rank), points: one.points.filter(p => chosen.epoch === "all" || p[4] == chosen.epoch).filter(p => p[k] != null).map(p => [p[0], p[k]]) })).filter(line => line.points.length);
  const points = list.flatMap(one => one.points), seconds = points.reduce((sum, p) => sum + p[3], 0), mean = seconds ? points.reduce((sum, p) => sum + p[2] * p[3], 0) / seconds : null;
  const rows = curves(1), tokens = curves(5), who = list.some(one => one.rank < 0) ? ", all ranks together" : list.some(one => one.ranks > 1) ? ", each rank" : "";
  return section("speed", "Speed, and waiting for data",
    el("h3", {}, `${unitOf(run.now)}s per second` + who), chart("speed-svg", rows, { x: hour, y: short, nothing: "Nothing to draw yet: the first speed is recorded after a second." }),
    tokens.length ? el("h3", {}, "tokens per second" + who + (run.now.tokens_are_padded ? ", with padding" : "")) : null, tokens.length ? chart("tokens-svg", tokens, { x: hour, y: short }) : null,
    el("h3", {}, "share of the time that the model waited for data"), chart("waited-svg", curves(2), { x: hour, y: v => (100 * v).toFixed(v < .1 && v ? 1 : 0) + " %", high: .05 }),
    rows.length > 1 ? legend(list.slice(0, 12).map(one => [name(one), "line", one.start, one.rank < 0 ? "" : dash(one.rank)])) : null,
    mean == null ? null : note(`On average the model waited ${percent(mean)} of the time. ` + (mean > .2 ? "That is a lot: loader.stats() shows what takes the time, and midepoch bench measures other settings." : "")));
}

function layout(data) {
  const width = wide(), node = board("layout-svg", width, 70), total = data.list.reduce((sum, file) => sum + file.rows, 0) || 1;
  let at = 0;
  data.list.forEach((file, k) => {
    const w = file.rows / total * width;
    node.append(draw("rect", { x: at, y: 4, width: Math.max(.4, w - (w > 3 ? 1 : 0)), height: 40, fill: colour(file.source || 0), "fill-opacity": k % 2 ? .5 : .8 },
      `${file.name}\n${plural(file.rows, "row")}` + (file.blocks == null ? "" : `, ${plural(file.blocks, "block")}, ${size(file.bytes)}`)));
    at += w;
  });
  node.append(label(0, 62, "row 0"), label(width, 62, "row " + number(total - 1), "end"));
  const columns = data.columns && table("columns", ["column", ["type", "text"]], data.columns.map(one => [one.name, [one.type, "text"]]), "wide");
  return section("layout", "Data layout", node, data.sources.length > 1 ? legend(data.sources.map((name, k) => [name, "box", k])) : null,
    note(plural(data.files, "file") + (data.blocks == null ? "" : `, ${plural(data.blocks, "block")}`) + `, ${plural(total, "row")}, in the order of the files; widths are rows. Hover over a file for its name.`), columns);
}

function shuffled(data) {
  const name = data.scope === "none" ? "in order" : `shuffled by ${data.scope}` + (data.window ? `, ${plural(data.window, "block")} per window` : "");
  const highest = most(data.true.picture) * 2, width = Math.min(560, wide());
  const kinds = [["mine", name, "var(--one)", ""], ["true", "a true permutation", "var(--two)", "6 3"]];
  const lines = pairs => kinds.map(([key, text, fill, dashes]) => ({ name: text, colour: fill, dash: dashes, points: pairs(data[key]) }));
  const first = data.mine.serial[0], batch = data.mine.imbalance, best = data.true.imbalance;
  const pairs = first && (data.spans ? `${number(first[2])} pairs of neighbours, in ${plural(data.spans[0], "span")} of ${number(data.spans[1])} positions` : `all ${number(first[2])} pairs of neighbours`);
  return section("shuffle", "Shuffle quality", legend(kinds.map(([, text, fill, dashes]) => [text, "line", fill, dashes])),
    el("div", { class: "pair" },
      el("div", {}, el("h3", {}, `${name} (epoch ${data.epoch})`), picture("order-mine", data.mine.picture, data.cells, highest)),
      el("div", {}, el("h3", {}, "a true permutation of the rows"), picture("order-true", data.true.picture, data.cells, highest))),
    note("From left to right the positions of the epoch, from top to bottom the rows of the data. An even colour is best; a diagonal is file order."),
    el("div", { class: "pair" },
      el("div", {}, el("h3", {}, "serial correlation of rows, by distance"), chart("serial-svg", lines(one => one.serial.map(([lag, r]) => [Math.log2(lag), r])), { width, high: .1, low: -.1, x: v => `${number(2 ** Math.round(v))} apart`, y: v => v.toFixed(2), nothing: "There are too few rows." }),
        note(first ? `${first[1].toFixed(3)} between neighbours. It is the correlation coefficient of the row numbers at two positions, here over ${pairs}: 1 is file order, 0 means unrelated, and values within ±${data.noise.toFixed(3)} are noise.` : null)),
      el("div", {}, el("h3", {}, `imbalance of batches of ${plural(data.batch, "row")}, by ${data.label || data.classes}`), chart("balance-svg", lines(one => one.imbalance.positions.map((p, k) => [p, one.imbalance.values[k]])), { width, high: .1, x: v => "position " + number(v), y: v => percent(v) }),
        note(`On average ${percent(batch.mean)}, of a true permutation ${percent(best.mean)}. 0 is the balance of all data.`))));
}

function checkpoints(list) {
  const bad = list.steps.filter(one => one.problem).length;
  return section("checkpoints", "Checkpoints", list.problem ? el("p", { class: "bad" }, list.problem) : null,
    list.steps.length ? table("checkpoint-table", ["step", "saved", "ranks", "parts", "size", ""], [...list.steps].reverse().map(one => [number(one.step), one.time ? clock(one.time) : "?", number(one.world_size), one.parts.join(", "), size(one.bytes), one.problem ? ["✕ " + one.problem, "bad"] : [list.read ? "✓ complete" : "✓ present", "good"]])) : null,
    note((bad ? `${bad} damaged: restore_latest skips ${bad === 1 ? "it" : "them"}. ` : list.steps.length ? "None is damaged. " : "There is none yet. ") + (list.read ? "Every byte was read." : "Only their manifests were checked.") + (list.more ? ` ${number(list.more)} older ${list.more === 1 ? "one is" : "ones are"} not shown.` : "")));
}

function theme() {
  const dark = document.documentElement.dataset.theme ? document.documentElement.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.dataset.theme = dark ? "light" : "dark";
  show();
}
function filters(run) {
  const numbers = [...new Set(run.speed.map(one => one.rank))].filter(rank => rank >= 0).sort((a, b) => a - b);
  const list = [
    found.runs.length > 1 ? pick("run", found.runs.map((one, k) => [k, nameOf(one, k)])) : null,
    run.starts > 1 ? pick("start", [["all", "all"], ...[...Array(run.starts).keys()].map(k => [k + 1, String(k + 1)])]) : (chosen.start = "all", null),
    run.epochs.length > 1 ? pick("epoch", [["all", "all"], ...run.epochs.map(one => [one.epoch, String(one.epoch)])]) : (chosen.epoch = "all", null),
    numbers.length > 1 ? pick("rank", [["all", "all"], ...numbers.map(rank => [rank, String(rank)])]) : (chosen.rank = "all", null)].filter(Boolean);
  return list.length ? section("chosen", "Show", el("div", { class: "filters", id: "filters" }, ...list)) : null;
}
function show() {
  const run = found.runs[chosen.run] || found.runs[0] || null, several = found.runs.length > 1, data = (run || found).data, order = (run || found).shuffle;
  document.title = (run && LIVE ? stateOf(run.now)[0] + " " : "") + found.title + " · midepoch";
  document.getElementById("page").replaceChildren(
    el("header", {}, el("h1", {}, found.title), run && !several ? badge(run.now) : null, el("span", { class: "dim", id: "made" }, (LIVE ? "updated " + hour(found.made) : "made " + clock(found.made))), el("span", { class: "grow" }), el("button", { onclick: theme, id: "theme" }, "light / dark")),
    ...[several && sideBySide(), run && filters(run), run && several && el("header", {}, el("h1", {}, nameOf(run, Number(chosen.run))), badge(run.now)), run && dashboard(run), overview(run), run && consumption(run), run && timeline(run), run && speed(run),
      data && layout(data), order && shuffled(order), found.checkpoints && checkpoints(found.checkpoints)].filter(Boolean));
}
async function refresh() {
  try {
    const answer = await fetch("data.json" + location.search, { cache: "no-store" });
    if (!answer.ok) throw new Error(await answer.text());
    const text = await answer.text();
    if (document.activeElement && document.activeElement.tagName === "SELECT") return;
    found = JSON.parse(text);
    show();
  } catch (problem) { document.getElementById("made").textContent = "no answer: " + problem.message; }
}
let resized;
addEventListener("resize", () => { clearTimeout(resized); resized = setTimeout(show, 150); });
show();
if (LIVE) setInterval(refresh, 2000);
