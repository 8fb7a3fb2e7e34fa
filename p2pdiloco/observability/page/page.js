// The page of a peer: shows the data that /stream sends. It requests nothing else, but for /chat, if the peer has that.
//
// Rules of this file:
// 1. Text of other peers is inserted as text only (textContent), never as markup.
// 2. No libraries and no other origins. All memory is bounded.
// 3. The peer computes the numbers (p2pdiloco/observability). This script only formats and draws them.
"use strict";

const $ = (id) => document.getElementById(id);
const say = (id, text) => { const at = $(id); if (at.textContent !== text) at.textContent = text; };
const SVG = "http://www.w3.org/2000/svg";
const LINK_POINTS = 120, STALE_MS = 6000, AGAIN_MS = 2000;
let picture = null, history = null, source = null, heardAt = 0, overTime = false, cursor = null, isPaused = false;
const links = [];

// ---------------------------------------------------------------------------------------------------------- words

function short(peer) { return peer.length > 12 ? peer.slice(-6) : peer || "–"; }
function scaled(value, units, step) { let i = 0; while (value >= step && i < units.length - 1) { value /= step; i += 1; } return [value, units[i]]; }
function amount(value) { if (value == null) return "–"; const [v, unit] = scaled(value, ["", " k", " M", " G", " T"], 1000); return (unit && v < 100 ? v.toFixed(v < 10 ? 2 : 1) : Math.round(v).toLocaleString("en")) + unit; }
function bytes(value) { const [v, unit] = scaled(value || 0, ["B", "kB", "MB", "GB", "TB"], 1000); return (v < 100 && unit !== "B" ? v.toFixed(1) : Math.round(v)) + " " + unit; }
function percent(value, digits = 1) { return value == null ? "–" : (100 * value).toFixed(digits) + " %"; }
function duration(seconds) {
  const s = Math.round(seconds);
  if (s < 60) return s + " s";
  if (s < 3600) return Math.floor(s / 60) + " min " + String(s % 60).padStart(2, "0") + " s";
  if (s < 86400) return Math.floor(s / 3600) + " h " + String(Math.floor(s % 3600 / 60)).padStart(2, "0") + " min";
  return Math.floor(s / 86400) + " d " + Math.floor(s % 86400 / 3600) + " h";
}
function clock(at) { return new Date(at * 1000).toLocaleTimeString("en-GB"); }
function loss(value) { return value == null ? "–" : value.toFixed(3); }
function hue(peer) { let h = 0; for (const c of peer.slice(-8)) h = (h * 31 + c.charCodeAt(0)) >>> 0; return h % 360; }
function make(name, text, kind) { const e = document.createElement(name); if (text != null) e.textContent = text; if (kind) e.className = kind; return e; }
function draw(name, attributes, text) { const e = document.createElementNS(SVG, name); for (const k in attributes) e.setAttribute(k, attributes[k]); if (text != null) e.textContent = text; return e; }
function isOver() { return ["finished", "done", "ended"].includes(picture.course.phase); }
function isAtEnd() { return picture.playback !== null && picture.at >= picture.playback.ends; }
function color(name) { return getComputedStyle(document.documentElement).getPropertyValue(name).trim(); }

// --------------------------------------------------------------------------------------------------------- stream

function connect(query) {
  if (source) source.close();
  source = new EventSource("stream" + (query ? "?" + query : ""));
  source.addEventListener("picture", (event) => { heardAt = Date.now(); picture = JSON.parse(event.data); show(); });
  source.addEventListener("history", (event) => { history = JSON.parse(event.data); drawCurve(); setTimeout(drawLanes); });  // in two tasks, so that keys and scrolling are handled in between
  const mine = source;
  source.onerror = () => {
    pulse();
    if (mine.readyState === EventSource.CLOSED) setTimeout(() => { if (source === mine) connect(query); }, AGAIN_MS);
  };
}
function pulse() {
  const isLost = !heardAt || Date.now() - heardAt > STALE_MS;
  const hasEnded = heardAt && isLost && isOver();
  $("pulse").classList.toggle("lost", isLost && !hasEnded);
  $("pulse").classList.toggle("still", Boolean(hasEnded || heardAt && !isLost && picture.playback && (isPaused || isAtEnd())));
  document.body.classList.toggle("stale", Boolean(heardAt && isLost));
  say("pulse", !heardAt ? "connecting" : hasEnded ? `this peer stopped at ${clock(picture.at)}` : isLost ? "the peer does not answer; retrying" : !picture.playback ? "live" : isAtEnd() ? "end of the recording" : isPaused ? "paused" : "playing");
}

// -------------------------------------------------------------------------------------------------------- picture

function show() {
  const p = picture, c = p.course, a = p.headcount, l = p.link;
  document.title = (c.held_out_loss != null ? loss(c.held_out_loss) + " · " : "") + p.title.name;
  say("name", p.title.name);
  say("where", `run ${p.title.run.slice(0, 12)} · ${p.title.parameters ? amount(p.title.parameters) + " parameters · " : ""}seen by ${short(p.title.me)}`);
  say("phase", c.phase);
  $("phase").className = "badge" + (c.phase === "training" || c.phase === "following" ? "" : isOver() ? " over" : " waits");
  const done = c.done == null ? null : Math.floor(1000 * c.done) / 1000;
  $("done").style.width = (100 * (done || 0)) + "%";
  $("bar").setAttribute("aria-valuenow", String(Math.round(100 * (done || 0))));
  say("percent", done == null ? "" : percent(done));
  say("steps", `step ${c.step.toLocaleString("en")}` + (c.total_steps && done != null ? ` of ${c.total_steps.toLocaleString("en")}` : ""));
  say("left", c.left_s != null && !isOver() ? ` · ${duration(c.left_s)} left` : "");
  say("loss", loss(c.held_out_loss));
  const measured = c.held_out_loss == null ? "not measured yet" : isOver() ? `last measured at step ${c.held_out_step.toLocaleString("en")}` : `at step ${c.held_out_step.toLocaleString("en")} · training ${loss(c.train_loss)}`;
  say("loss-more", c.reward == null ? measured : `${measured} · reward ${loss(c.reward)}`);
  say("merged", amount(c.tokens_merged));
  const mine = p.peers.find((row) => row.is_me);
  say("share", mine && mine.share > 0 ? `this machine contributed ${percent(mine.share)}` : "this machine has contributed nothing yet");
  say("rate", amount(c.swarm_tokens_per_s));
  say("rate-more", `this machine ${amount(c.tokens_per_s)}`);
  say("live", String(a.live));
  say("live-more", `${a.known} known · ${a.participating} ${a.participating === 1 ? "trains" : "train"} · ${a.weight_averaged} in the last merge`);
  say("up", bytes(l.up_per_s) + "/s");
  say("up-more", l.up_budget ? `${percent(Math.min(1, l.up_per_s / l.up_budget), 0)} of ${bytes(l.up_budget)}/s · ${bytes(l.up_bytes)} in all` : `${bytes(l.up_bytes)} in all · no limit`);
  const spent = p.costs.compute_s + p.costs.overhead_s;
  say("overhead", spent ? percent(p.costs.overhead_s / spent) : "–");
  say("overhead-more", spent ? `of the learner's time between steps · waited ${p.costs.blocked_s.toFixed(3)} s for the network · node used ${percent(p.costs.node_cpu_s / spent)} of a core` : "no steps on this machine yet");
  showTroubles(p.troubles); showHeadlines(p.headlines); showPeers(p); showMerges(p.merges); showCounts(p.counts); say("counts-since", p.playback ? "in the recorded logs" : "since this peer started");
  showShards(p.shards, p.at); showSample(p.sample); showPlayback(p.playback, p.at); showLink(p);
  pulse();
}
function showTroubles(troubles) {
  const box = $("troubles");
  box.hidden = troubles.length === 0;
  if (box.dataset.told === troubles.join("\n")) return;
  box.dataset.told = troubles.join("\n");
  box.replaceChildren(...troubles.map((text) => make("p", text)));
}
function showHeadlines(headlines) {
  const box = $("headlines"), mark = headlines.length ? headlines[0].at + "/" + headlines.length + headlines[0].text : "";
  if (box.dataset.mark === mark) return;
  box.dataset.mark = mark;
  box.replaceChildren(...headlines.map((h) => {
    const item = make("li"), time = make("time", clock(h.at));
    time.dateTime = new Date(h.at * 1000).toISOString();
    item.append(time, make("span", h.text, ["good", "warning", "error"].includes(h.level) ? h.level : ""));
    return item;
  }));
  if (!headlines.length) box.append(make("li", "nothing yet"));
}
const lines = new Map();  // the row of each peer, reused: with 64 peers, creating the rows is most of the work
function lineOf(row) {
  if (lines.has(row.peer)) return lines.get(row.peer);
  const line = make("tr"), kinds = ["peer", "", "n", "n", "n", "n", "n", "n", "", "n"];
  line.append(...kinds.map((kind) => make("td", kind ? null : "", kind)));
  const [name, , share] = line.children, meter = make("span", null, "meter");
  name.title = row.peer;
  name.style.setProperty("--peer", `hsl(${hue(row.peer)} 55% 50%)`);
  name.append(short(row.peer));
  if (row.is_me) name.append(make("span", "this machine", "me"));
  meter.append(make("i"));
  share.append("", meter);
  lines.set(row.peer, line);
  return line;
}
function tell(cell, text, kind) { if (cell.textContent !== text) cell.textContent = text; if (kind != null && cell.className !== kind) cell.className = kind; }
function showPeers(p) {
  const live = p.peers.filter((row) => row.is_live).length, body = $("peers").tBodies[0];
  say("peers-words", `${live} live` + (p.peers.length > live ? `, ${p.peers.length - live} left` : ""));
  const most = Math.max(1e-9, ...p.peers.map((row) => row.share));
  p.peers.forEach((row, i) => {
    const line = lineOf(row), w = row.words, r = row.reach, [, role, share, rate, ofLoss, version, commits, up, way, trip] = line.children;
    const state = row.is_live ? "" : "gone", percents = percent(row.share), width = (100 * row.share / most).toFixed(1) + "%";
    if (line.className !== state) line.className = state;
    if (share.firstChild.data !== percents) share.firstChild.data = percents;
    if (share.lastChild.firstChild.style.width !== width) share.lastChild.firstChild.style.width = width;
    if (w && w.trouble) tell(role, w.trouble, "bad");
    else tell(role, !row.is_live ? (row.is_me ? p.course.phase : "left") : w && w.phase !== "training" ? w.phase : row.is_participating ? "trains" : "follows", "");
    tell(rate, w ? amount(w.tokens_per_s) : "–");
    tell(ofLoss, w ? loss(w.loss) : "–");
    tell(version, w ? (w.version_min === w.version_max ? String(w.version_max) : w.version_min + "–" + w.version_max) : "–");
    tell(commits, String(row.commits));
    tell(up, w ? bytes(w.up_bytes) : "–");
    tell(way, row.is_me ? "" : r ? `${r.how}, ${duration(Math.max(0, p.at - r.since))}` + (r.lanes > 1 ? `, ${r.lanes} lanes` : "") : row.is_live ? "–" : row.seen ? `seen ${duration(Math.max(0, p.at - row.seen))} ago` : "–");
    way.title = r ? r.address : "";
    tell(trip, r && r.round_trip_s != null ? (1000 * r.round_trip_s).toFixed(r.round_trip_s < 0.01 ? 1 : 0) + " ms" : "–");
    if (body.children[i] !== line) body.insertBefore(line, body.children[i] || null);
  });
  while (body.children.length > p.peers.length) { lines.delete(body.lastChild.firstChild.title); body.lastChild.remove(); }
}
function showMerges(merges) {
  $("merges").tBodies[0].replaceChildren(...merges.map((m) => {
    const line = make("tr"), owner = make("td", short(m.owner), "peer");
    owner.title = m.owner;
    owner.style.setProperty("--peer", `hsl(${hue(m.owner)} 55% 50%)`);
    line.append(make("td", clock(m.at)), make("td", String(m.shard), "n"), make("td", String(m.version), "n"), owner, make("td", String(m.contributors), "n"), make("td", m.tokens.toLocaleString("en"), "n"));
    return line;
  }));
}
function showCounts(counts) {
  const rows = Object.entries({ fork: 0, refusal: 0, ...counts });
  const words = { fork: "healed forks", refusal: "rejected contributions" };
  $("counts").replaceChildren(...rows.flatMap(([what, number]) => [make("dt", words[what] || what), make("dd", number.toLocaleString("en"))]));
  if (!rows.some(([what]) => what.startsWith("fault"))) $("counts").append(make("dt", "faults of other peers"), make("dd", "0"));
}
function showShards(shards, now) {
  const versions = shards.map((s) => s.version), least = Math.min(...versions), most = Math.max(...versions);
  say("shards-now", shards.length ? `${shards.length} shards, ${least === most ? most : least + "–" + most}` : "none yet");
  const box = $("shards");
  while (box.children.length > Math.min(shards.length, 256)) box.lastChild.remove();
  while (box.children.length < Math.min(shards.length, 256)) box.append(make("i"));
  shards.slice(0, 256).forEach((s, i) => {
    const bar = box.children[i];
    bar.style.height = (most ? 8 + 92 * (s.version - Math.max(0, least - 3)) / Math.max(1, most - Math.max(0, least - 3)) : 8) + "%";
    bar.className = now - s.at < 2.5 ? "fresh" : "";
    bar.title = `shard ${s.shard}: version ${s.version}`;
  });
}
function showSample(sample) {
  $("sample-box").hidden = !sample;
  if (sample) { say("sample", sample.text); say("sample-when", `at step ${sample.step.toLocaleString("en")}`); }
}

// --------------------------------------------------------------------------------------------------------- curves

function frame(box, left, bottom) {
  const width = box.clientWidth, height = box.clientHeight, svg = draw("svg", { viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" });
  return { svg, width, height, left, right: width - 14, top: 8, bottom: height - bottom };
}
function ticks(low, high, count) {
  const raw = (high - low) / count || 1, unit = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((m) => m * unit).find((s) => s >= raw) || raw, found = [];
  for (let t = Math.ceil(low / step) * step; t <= high + step * 1e-6; t += step) found.push(t);
  return found;
}
function decimals(marks) { return marks.length < 2 ? 1 : Math.max(1, Math.ceil(-Math.log10(marks[1] - marks[0]) - 1e-6)); }
function path(points, x, y) { return points.map((p, i) => (i ? "L" : "M") + x(p).toFixed(1) + " " + y(p[2]).toFixed(1)).join(""); }
function tokensAt(at) {
  const all = history.train.length > history.held_out.length ? history.train : history.held_out;
  let before = all[0];
  for (const p of all) { if (p[1] > at) return p[1] > before[1] ? before[0] + (p[0] - before[0]) * Math.max(0, at - before[1]) / (p[1] - before[1]) : p[0]; before = p; }
  return before ? before[0] : 0;
}
function merged(points) {
  if (overTime) return points;
  const found = [];
  for (let i = 0, j = 0; i < points.length; i = j) {
    let sum = 0;
    for (j = i; j < points.length && points[j][0] === points[i][0]; j += 1) sum += points[j][2];
    found.push([points[i][0], points[j - 1][1], sum / (j - i)]);
  }
  return found;
}
function drawCurve() {
  const box = $("curve");
  if (!history || !box.clientWidth) return;
  const held = history.held_out, train = merged(history.train), all = held.concat(train);
  if (!all.length) { box.replaceChildren(make("p", "no loss has been measured yet", "quiet")); say("curve-words", ""); return; }
  const f = frame(box, 44, 26), of = (p) => overTime ? p[1] : p[0];
  const xs = all.map(of), low = Math.min(...xs), high = Math.max(...xs, low + (overTime ? 10 : 1000));
  const ys = all.map((p) => p[2]), least = Math.min(...ys), most = Math.max(...ys);
  const pad = (most - least || 1) * 0.08, y0 = Math.max(0, least - pad), y1 = most + pad;
  const x = (p) => f.left + (of(p) - low) / (high - low) * (f.right - f.left), y = (v) => f.bottom - (v - y0) / (y1 - y0) * (f.bottom - f.top);
  const heights = ticks(y0, y1, 6);
  for (const t of heights) f.svg.append(draw("line", { x1: f.left, x2: f.right, y1: y(t), y2: y(t), stroke: color("--grid") }), draw("text", { x: f.left - 8, y: y(t) + 4, "text-anchor": "end" }, t.toFixed(decimals(heights))));
  const base = overTime ? low : 0;
  for (const t of ticks(low - base, high - base, Math.max(2, Math.floor(f.width / 130)))) {
    const at = f.left + (t + base - low) / (high - low) * (f.right - f.left);
    f.svg.append(draw("text", { x: Math.min(at, f.right - 16), y: f.bottom + 18, "text-anchor": "middle" }, overTime ? (t ? duration(t) : "0") : amount(t)));
  }
  const marks = history.marks.slice(-24).map((m) => [m, overTime ? m.at : tokensAt(m.at)]).filter(([, at]) => at >= low && at <= high), isCrowded = marks.length > 8;
  const places = marks.map(([, at]) => f.left + (at - low) / (high - low) * (f.right - f.left));
  let taken = f.left;  // up to here, there is a label or a mark
  marks.forEach(([m], i) => {
    const px = places[i], tone = color(m.level === "good" ? "--good" : "--warning");
    const line = draw("line", { x1: px, x2: px, y1: f.top, y2: f.bottom, stroke: tone, "stroke-dasharray": "3 4", "stroke-width": isCrowded ? 1 : 1.2, opacity: isCrowded ? 0.4 : 1 });
    line.append(draw("title", {}, m.text));
    f.svg.append(line);
    const words = m.text.split(";")[0], width = 6.8 * words.length + 10;
    const isBefore = px + width > (places[i + 1] ?? f.right), isFree = isBefore ? px - width > taken : px >= taken;
    if (!isCrowded && isFree) {
      const label = draw("text", { x: px + (isBefore ? -5 : 5), y: f.top + 10, "text-anchor": isBefore ? "end" : "start" }, words);
      label.style.fill = tone; f.svg.append(label);
    }
    taken = isFree && !isBefore ? px + width : px;
  });
  if (train.length > 1) f.svg.append(draw("path", { d: path(train, x, y), fill: "none", stroke: color("--second"), "stroke-width": 1.3, opacity: 0.75, "stroke-linejoin": "round" }));
  if (held.length > 1) f.svg.append(draw("path", { d: path(held, x, y), fill: "none", stroke: color("--main"), "stroke-width": 2.4, "stroke-linejoin": "round" }));
  if (held.length < 90) for (const p of held) f.svg.append(draw("circle", { cx: x(p), cy: y(p[2]), r: 3, fill: color("--panel"), stroke: color("--main"), "stroke-width": 2 }));
  const list = held.length > 1 ? held : train;
  if (cursor != null && list.length) {
    const p = list[Math.max(0, Math.min(list.length - 1, Math.round(cursor * (list.length - 1))))], right = x(p) > f.width * 0.6;
    f.svg.append(draw("line", { x1: x(p), x2: x(p), y1: f.top, y2: f.bottom, stroke: color("--quiet") }), draw("circle", { cx: x(p), cy: y(p[2]), r: 5, fill: color("--main") }),
      draw("text", { x: x(p) + (right ? -10 : 10), y: f.top + 26, "text-anchor": right ? "end" : "start", class: "tip" }, `${loss(p[2])} at ${amount(p[0])} tokens, ${clock(p[1])}`));
  }
  box.replaceChildren(f.svg);
  const words = $("curve-words");
  words.replaceChildren(make("span", null, "key main"), "held-out loss of the global model", make("span", null, "key second"), "this machine's training loss");
  if (held.length) box.setAttribute("aria-description", `held-out loss from ${loss(held[0][2])} to ${loss(held[held.length - 1][2])}`);
}
function showLink(p) {
  if (!p.playback || links.length === 0 || links[links.length - 1].at !== p.at) links.push({ at: p.at, up: p.link.up_per_s, down: p.link.down_per_s });
  while (links.length > LINK_POINTS) links.shift();
  say("link-now", `${bytes(p.link.up_per_s)}/s out` + (p.playback ? "" : `, ${bytes(p.link.down_per_s)}/s in`));
  $("received-key").hidden = Boolean(p.playback);  // the event log has no received bytes
  $("budget-key").hidden = !p.link.up_budget;
  const box = $("link");
  if (!box.clientWidth || links.length < 2) return;
  const f = frame(box, 52, 6), peak = Math.max(1000, ...links.flatMap((l) => [l.up, l.down])) * 1.1, budget = p.link.up_budget;
  const x = (i) => f.left + (LINK_POINTS - links.length + i) / (LINK_POINTS - 1) * (f.right - f.left), y = (v) => f.bottom - v / peak * (f.bottom - f.top);
  for (const t of ticks(0, peak, 2)) f.svg.append(draw("line", { x1: f.left, x2: f.right, y1: y(t), y2: y(t), stroke: color("--grid") }), draw("text", { x: f.left - 6, y: y(t) + 4, "text-anchor": "end" }, bytes(t)));
  if (budget && budget <= peak) f.svg.append(draw("line", { x1: f.left, x2: f.right, y1: y(budget), y2: y(budget), stroke: color("--quiet"), "stroke-dasharray": "2 3" }));
  for (const [key, tone] of p.playback ? [["up", "--main"]] : [["down", "--second"], ["up", "--main"]]) f.svg.append(draw("path", { d: links.map((l, i) => (i ? "L" : "M") + x(i).toFixed(1) + " " + y(l[key]).toFixed(1)).join(""), fill: "none", stroke: color(tone), "stroke-width": 1.8 }));
  box.replaceChildren(f.svg);
}
function drawLanes() {
  const canvas = $("lanes");
  if (!history) return;
  const order = new Map((picture ? picture.peers : []).map((row, i) => [row.peer, i]));
  const lanes = history.lanes.slice().sort((a, b) => (order.get(a.peer) ?? 999) - (order.get(b.peer) ?? 999));
  const box = canvas.parentElement, usual = Math.max(14, Math.min(40, Math.floor(230 / Math.max(1, lanes.length))));
  box.style.minHeight = Math.min(520, Math.max(1, lanes.length) * usual + 22) + "px";
  const width = box.clientWidth, row = Math.max(usual, Math.min(115, Math.floor((box.clientHeight - 22) / Math.max(1, lanes.length))));  // the panel beside may leave more room
  const height = Math.max(1, lanes.length) * row + 22, ratio = window.devicePixelRatio || 1;
  canvas.width = width * ratio; canvas.height = height * ratio; canvas.style.height = height + "px";
  const g = canvas.getContext("2d");
  g.scale(ratio, ratio); g.font = `${row < 18 ? 10 : 12}px system-ui, sans-serif`; g.textBaseline = "middle";
  const left = Math.min(width / 3, Math.max(50, ...lanes.map((l) => g.measureText(short(l.peer)).width)) + 10), columns = Math.max(20, ...lanes.map((l) => Math.max(l.given.length, l.owned.length))), step = (width - left - 6) / columns;
  const most = Math.max(1, ...lanes.flatMap((l) => l.given)), ink = color("--ink"), quiet = color("--quiet"), lane = color("--lane"), dot = color("--second"), grid = color("--grid");
  lanes.forEach((l, i) => {
    const y = i * row;
    g.fillStyle = order.has(l.peer) && picture.peers[order.get(l.peer)].is_live ? ink : quiet;
    g.fillText(short(l.peer), 0, y + row / 2);
    g.fillStyle = grid; g.fillRect(left, y + row - 1, width - left, 1);
    l.given.forEach((tokens, c) => { if (tokens) { g.fillStyle = `rgba(${lane}, ${0.18 + 0.82 * tokens / most})`; g.fillRect(left + c * step, y + 2, Math.max(1, step - (step > 4 ? 1 : 0)), row - 5); } });
    g.fillStyle = dot;
    l.owned.forEach((n, c) => { if (n) { g.beginPath(); g.arc(left + (c + 0.5) * step, y + row / 2 - 0.5, Math.min(row / 4.5, 1.4 + 0.6 * Math.sqrt(n), Math.max(1.2, step * 0.7)), 0, 7); g.fill(); } });
  });
  g.fillStyle = quiet; g.font = "11px system-ui, sans-serif";
  if (!lanes.length) g.fillText("no version has been merged yet", left, row / 2);
  const seconds = columns * history.column_s;
  for (const t of ticks(0, seconds, Math.max(2, Math.floor(width / 160)))) { const px = left + t / history.column_s * step; if (px < width - 24) g.fillText(t ? duration(t) : "0", px, height - 8); }
  canvas.setAttribute("aria-label", `lanes of ${lanes.length} peers over ${duration(seconds)}`);
}

// ------------------------------------------------------------------------------------------------------- playback

let isSeeking = false;
function showPlayback(playback, at) {
  $("playback").hidden = !playback;
  if (!playback) return;
  if (!isSeeking) $("seek").value = String(1000 * (at - playback.begins) / Math.max(1e-9, playback.ends - playback.begins));
  $("play").textContent = isPaused || isAtEnd() ? "▶" : "❚❚";
  say("moment", `${duration(Math.max(0, at - playback.begins))} of ${duration(playback.ends - playback.begins)}`);
  const speed = $("speed"), now = String(playback.speed);
  if (playback.speed > 0 && speed.value !== now && [...speed.options].some((o) => o.value === now)) speed.value = now;
}
function replay(at, speed) {
  links.length = 0;
  connect(`at=${at.toFixed(3)}&speed=${isPaused ? 0 : speed}`);
}
$("play").onclick = () => {
  if (!picture || !picture.playback) return;
  const isAgain = isAtEnd();
  isPaused = !isAgain && !isPaused;
  replay(isAgain ? picture.playback.begins : picture.at, $("speed").value);
};
$("speed").onchange = () => { if (picture) replay(picture.at, $("speed").value); };
$("seek").oninput = () => { isSeeking = true; };
$("seek").onchange = () => { isSeeking = false; const b = picture.playback; replay(b.begins + $("seek").value / 1000 * (b.ends - b.begins), $("speed").value); };

// ----------------------------------------------------------------------------------------------------------- keys

async function continueText(event) {
  event.preventDefault();
  const prompt = $("prompt").value, ask = $("ask");
  if (ask.disabled) return;
  ask.disabled = true;
  say("chat-when", "the model writes …");
  try {
    const answer = await fetch("chat", { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify({ prompt }) });
    const reply = answer.ok ? await answer.json() : { error: (await answer.text()).trim() };
    say("chat-when", reply.error || `by the version of step ${reply.step.toLocaleString("en")}`);
    if (!reply.error) {
      const given = reply.text.startsWith(prompt) ? prompt : "";
      $("answer").hidden = false;
      $("answer").replaceChildren(make("span", given, "given"), reply.text.slice(given.length));
    }
  } catch { say("chat-when", "the peer does not answer"); }
  ask.disabled = false;
}
function choose(time) { overTime = time; $("over-time").setAttribute("aria-pressed", String(time)); $("over-tokens").setAttribute("aria-pressed", String(!time)); drawCurve(); }
function redraw() { drawCurve(); drawLanes(); if (picture) showLink(picture); }
function changeTheme() {
  const isDark = (document.documentElement.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  document.documentElement.dataset.theme = isDark ? "light" : "dark";
  try { localStorage.setItem("theme", document.documentElement.dataset.theme); } catch { /* not available in private windows */ }
  redraw();
}
$("over-time").onclick = () => choose(true);
$("over-tokens").onclick = () => choose(false);
$("theme").onclick = changeTheme;
$("curve").onpointermove = (event) => { const box = $("curve").getBoundingClientRect(); cursor = Math.max(0, Math.min(1, (event.clientX - box.left - 44) / Math.max(1, box.width - 58))); drawCurve(); };
$("curve").onpointerleave = () => { cursor = null; drawCurve(); };
$("curve").onkeydown = (event) => {
  if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
  event.preventDefault();
  cursor = Math.max(0, Math.min(1, (cursor ?? 1) + (event.key === "ArrowLeft" ? -0.02 : 0.02)));
  drawCurve();
};
addEventListener("keydown", (event) => {
  if (event.target.matches("input, select, button, textarea") || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "t") changeTheme();
  if (event.key === "x") choose(!overTime);
  if (event.key === " " && picture && picture.playback) { event.preventDefault(); $("play").click(); }
});
$("prompt").onkeydown = (event) => { if (event.key === "Enter" && event.ctrlKey) continueText(event); };
$("chat-form").onsubmit = continueText;
fetch("chat").then((answer) => answer.json()).then((has) => { $("chat").hidden = !has; }, () => {});
addEventListener("resize", redraw);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
try { const kept = localStorage.getItem("theme"); if (kept === "light" || kept === "dark") document.documentElement.dataset.theme = kept; } catch { /* not available */ }
setInterval(pulse, 1000);
connect(new URLSearchParams(location.search).has("at") ? location.search.slice(1) : "");
