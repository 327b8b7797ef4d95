// The formulas of catalogue.py, network.py (busiest link) and training_step.py. A test compares both implementations.

const sum = (values) => values.reduce((a, b) => a + b, 0);
const mean = (values) => sum(values) / values.length;
const most = (values) => values.reduce((a, b) => Math.max(a, b), -Infinity);
const zeros = (count) => new Array(count).fill(0);
const longer = (first, second) => first.map((value, rank) => Math.max(value, second[rank]));

function popularity(edges, exponent) {
  const [count, weight] = [[], []];
  for (let bin = 0; bin + 1 < edges.length; bin++) {
    const [from, to] = [edges[bin], edges[bin + 1]];
    const [first, last] = [from - 0.5, to - 0.5];
    count.push(to - from);
    if (to - from === 1) weight.push(from ** -exponent);
    else if (Math.abs(exponent - 1) < 1e-9) weight.push(Math.log(last / first));
    else weight.push((last ** (1 - exponent) - first ** (1 - exponent)) / (1 - exponent));
  }
  const all = sum(weight);
  return { count, chance: weight.map((value, bin) => value / all / count[bin]) };
}

// The expected number of different rows of `tokens` lookups, or of the rows that they share with `others` lookups.
function expectedRows(known, tokens, others = null) {
  const needed = known.count.map((count, bin) => count * (others === null ? 1 : -Math.expm1(-others * known.chance[bin])));
  const of = (asked) => sum(needed.map((rows, bin) => -Math.expm1(-asked * known.chance[bin]) * rows));
  const [low, high] = [-most(tokens.map((value) => -value)), most(tokens)];
  if (high <= 0) return zeros(tokens.length);
  if (tokens.length <= 24 || low === high) return tokens.map(of);
  const grid = Array.from({ length: 24 }, (_, place) => low + ((high - low) * place) / 23);
  const found = grid.map(of);
  return tokens.map((value) => {
    const place = Math.min(22, Math.floor(((value - low) / (high - low)) * 23));
    const share = (value - grid[place]) / (grid[place + 1] - grid[place]);
    return found[place] + share * (found[place + 1] - found[place]);
  });
}

// The time at which each rank has finished its exchange; `nodeShare` is null for an exchange in one level.
function finish(net, arrival, outgoing, incoming, hotOwner, nodeShare = null) {
  const ranks = arrival.length;
  if (ranks === 1) return arrival;
  const near = Math.min(net.ranks_per_node, ranks);
  const nodes = Math.ceil(ranks / net.ranks_per_node);
  let seconds;
  if (nodeShare !== null && nodes > 1) {
    const largest = most([most(outgoing), mean(outgoing), most(incoming), mean(incoming)]);
    const crossing = (nodeShare * Math.max(mean(outgoing), mean(incoming)) * (nodes - 1)) / nodes / net.bandwidth;
    seconds = 2 * net.latency + net.peer_latency * (near - 1 + nodes - 1) + (largest * (near - 1)) / near / net.node_bandwidth + crossing;
  } else {
    const [out, into] = [sum(outgoing), sum(incoming)];
    const others = (ranks - hotOwner) / (ranks - 1) ** 2;
    const sends = outgoing.map((own, rank) => own + (into - incoming[rank]) * others);
    const gets = incoming.map((own, rank) => own + (out - outgoing[rank]) * others);
    const largest = most([most(sends), most(gets), (out + hotOwner * into) / ranks, (into + hotOwner * out) / ranks]) / ranks;
    const busiest = Math.max(((ranks - near) * largest) / net.bandwidth, ((near - 1) * largest) / net.node_bandwidth);
    seconds = net.latency + net.peer_latency * (ranks - 1) + busiest;
  }
  const end = most(arrival) + seconds;
  return arrival.map(() => end);
}

function exposedAllReduce(net, load, behind) {
  const ranks = behind.length;
  const slowest = ranks > net.ranks_per_node ? net.bandwidth : net.node_bandwidth;
  const seconds = (size) => (ranks === 1 || size === 0 ? 0 : 2 * net.latency + (((2 * (ranks - 1)) / ranks) * size) / slowest);
  const last = seconds(Math.min(load.last_bucket, load.dense_bytes));
  return Math.max(last, seconds(load.dense_bytes) + most(behind.map((value) => -value)));
}

// The compute and the exchanged bytes of each step, from the sums of 1, L and L² over each rank's samples.
function expectedTraffic(steps, load, net, known, on) {
  const totals = steps.map((ranks) => sum(ranks.map(([, items]) => items)));
  return steps.map((ranks, index) => {
    const items = ranks.map(([, count]) => count);
    const compute = ranks.map(([count, length, square]) => load.constant * count + load.linear * length + load.quadratic * square);
    const before = totals[(index + steps.length - 1) % steps.length];
    const after = totals[(index + 1) % steps.length];
    const first = items.map((count) => count / on.micro_batches);
    const unique = expectedRows(known, items);
    const rows = on.dedup ? unique : items;
    const again = rows.map((count, rank) => count / Math.max(unique[rank], 1e-300)); // how often a row is sent
    const bytes = (counts) => counts.map((count) => count * load.row_bytes);
    const colliding = (others) => bytes(expectedRows(known, first, others).map((count, rank) => count * again[rank]));
    const node = Math.min(net.ranks_per_node, items.length);
    const typical = mean(items);
    const share = typical > 0 ? expectedRows(known, [node * typical])[0] / (node * expectedRows(known, [typical])[0]) : 1;
    const hotOwner = on.dedup ? 1 : 1 + (items.length - 1) * known.chance[0];
    return { compute, hotOwner, ids: rows.map((count) => count * 8), rows: bytes(rows), collidingRows: colliding(before), collidingGradients: colliding(after / on.micro_batches), share };
  });
}

const slowed = (work, span, slower) => work.map((seconds, rank) => seconds + Math.min(seconds, span[rank] / slower) * (slower - 1));

function plainStep(now, load, net) {
  const nothing = zeros(now.compute.length);
  let clock = nothing.map(() => load.host);
  clock = finish(net, clock, now.ids, nothing, now.hotOwner);
  clock = finish(net, clock, nothing, now.rows, now.hotOwner);
  clock = finish(net, clock.map((time, rank) => time + now.compute[rank] + load.base), now.rows, nothing, now.hotOwner);
  return most(clock) + exposedAllReduce(net, load, now.compute.map((seconds) => load.backward * seconds));
}

function overlappedStep(last, now, following, load, net, on) {
  const ranks = now.compute.length;
  const nothing = zeros(ranks);
  const how = [now.hotOwner, on.two_level ? now.share : null];
  const less = (first, second) => first.map((value, rank) => value - second[rank]);
  const calls = ((load.overlap_calls[0] + load.overlap_calls[1] * ranks) * load.call) / 2;
  let behind = nothing.map(() => calls * on.micro_batches);
  behind = finish(net, behind, less(last.rows, last.collidingGradients), nothing, ...how);
  behind = finish(net, behind, following.ids, nothing, ...how);
  behind = finish(net, behind, nothing, less(following.rows, following.collidingRows), ...how);
  const work = now.compute.map((seconds) => (seconds + load.base) * (1 + (on.split_backward ? load.split_cost : 0)));
  const slower = 1 + (on.sm_free ? 0 : load.contention);
  const late = work.map((seconds) => seconds * (on.split_backward ? load.late_weights : 0));
  const computed = slowed(less(work, late), behind, slower);
  let urgent = longer(computed, behind);
  urgent = finish(net, urgent, now.collidingGradients, nothing, ...how);
  urgent = finish(net, urgent, nothing, following.collidingRows, ...how);
  const beside = slowed(late, less(urgent, computed).map((seconds) => Math.max(seconds, 0)), slower);
  const weights = computed.map((seconds, rank) => seconds + beside[rank]);
  const hides = on.split_backward ? late : now.compute.map((seconds) => load.backward * seconds);
  return Math.max(most(weights), most(urgent)) + load.host + calls + exposedAllReduce(net, load, hides);
}

// The mean seconds of a step, and of its compute, mean over ranks.
function simulated(sums, load, net, edges, on) {
  const steps = sums[on.balance ? "balanced" : "drawn"];
  const traffic = expectedTraffic(steps, load, net, popularity(edges, load.exponent), on);
  const at = (index) => traffic[(index + traffic.length) % traffic.length];
  const walls = traffic.map((now, index) =>
    on.overlap ? overlappedStep(at(index - 1), now, at(index + 1), load, net, on) : plainStep(now, load, net));
  return { step: mean(walls), compute: mean(traffic.map((now) => mean(now.compute))) + load.base };
}
