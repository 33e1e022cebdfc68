------------------------------ MODULE StepLog ------------------------------
(***************************************************************************)
(* The step log, the vote in RAM, removal, rollback, a restore, and the    *)
(* adoption of another program's step: which step counts, for two lives of *)
(* a job or three. verification/model/README.md says what is checked,      *)
(* within which bounds, and what it costs.                                 *)
(*                                                                         *)
(* A life trains, saves in RAM and in storage, and ends at any moment; any *)
(* hosts lose their RAM. Its writer in storage may go on at any later      *)
(* moment, from wherever it was: a process that was stopped, or that the   *)
(* supervisor has not found yet. The next life restores, by the newest     *)
(* step or a requested one, or starts without a restore, and does the same.*)
(*                                                                         *)
(* Each action is one that is atomic outside too: the creation of a file,  *)
(* a rename, a decision that is set once. A crash between any two actions  *)
(* needs no action of its own in the last life: the invariants say of each *)
(* state what a restore would take by the RAM of any of the hosts, with    *)
(* storage and without.                                                    *)
(*                                                                         *)
(* A save is 10 * life + step. Life 0 and save 0: none.                    *)
(***************************************************************************)
EXTENDS Naturals, FiniteSets

CONSTANTS
  Procs,           \* the processes of the job, each on its host; each holds the whole state
  Last,            \* the last step
  LastLife,        \* the last life: 2 or 3
  FineVote,        \* a vote in RAM goes by single actions; FALSE: a save in RAM is one action
  FineStorage,     \* likewise the writers in storage
  OtherProgram,    \* another program writes one step, at any moment
  \* Defects. Each is FALSE in the sound model.
  NoPrecondition,  \* a version is written whether it exists or not
  OrderByClock,    \* lives are ordered by clocks, and the clock of life 2 may be behind
  MarkerFirst,     \* marker.json and Orbax's commit are written before the host states
  RemoveFirst,     \* the files of a step are deleted before a version says `removing`
  OwnChoice,       \* each process restores what its own RAM has, without a verdict
  OlderOverwrites, \* a marker or a host state replaces that of a newer life
  DeletesByPath,   \* a deletion takes the file of a name that was listed, whoever's it is by now
  DeletesUnchecked, \* a deletion does not read the log after it has listed files
  AdoptsUnfinished, \* a first save adopts a step that the other program has not committed
  AdoptsNothing,   \* a first save adopts no step
  AdoptsAsOwn,     \* a first save adopts with its own number, as if the step had come after it
  ForeignCounts,   \* a step beside the log counts by itself
  ForeignIsPassed  \* a restore passes over a step beside the log
ASSUME LastLife \in {2, 3} /\ (OtherProgram => LastLife = 2 /\ FineStorage)

Steps == 1..Last
Lives == 1..LastLife
Plain == 9  \* in the place of a life: the other program
Writers == Lives \cup IF OtherProgram THEN {Plain} ELSE {}
Save(l, n) == 10 * l + n
LifeOf(s) == s \div 10
StepOf(s) == s % 10
Max(S) == CHOOSE x \in S : \A y \in S : y <= x
Min(S) == CHOOSE x \in S : \A y \in S : y >= x
Min2(a, b) == IF a < b THEN a ELSE b

VARIABLES
  era,       \* 2 * l - 1: life l trains; 2 * l: it has ended, and the next has not begun
  parent,    \* for each life, the save from which it began; 0: from nothing
  chain,     \* for each life, its chain: the last step of each life that counts
  before,    \* the life whose chain was on record for the restore that is under way
  requested, \* TRUE when the user requested that step: the chain binds as the next save begins
  late,      \* the clock of life 2 is behind (OrderByClock)
  wiped,     \* for each life, the hosts that lost their RAM since its end
  \* In RAM, for each process.
  ram,       \* published saves
  known,     \* ledger: the newest complete save
  bound,     \* ledger: the life whose chain it has; 0: none
  doubt,     \* processes that have published and do not know the decision
  \* The vote of the life that trains.
  step,      \* the step of the latest vote
  open,      \* the vote has no decision yet
  decided,   \* for each life, the newest step that was decided to be complete: reported
  \* The restore of the next life.
  plan, source, loaded, verdict, restored,
  \* Storage.
  table,     \* the newest version: inc, the life on record; ch, the head of the chain; e, entries;
             \* num, the number of the life after which the other program's step was adopted
  at,        \* for each kind of file and step, the life whose files are in its folder
  hid,       \* saves whose tensors were renamed to `<step>.rolled-back-<incarnation>`
  listed,    \* for each life, the newest step that a version listed: reported
  other,     \* the other program's step: n; st, `part` or `whole`; how it came, see below
  \* The writer of each life in storage.
  pc, target, behind, view,
  doomed     \* for each life and kind of file, the life whose file it has listed, and deletes

ramVars == <<ram, known, bound, doubt>>
voteVars == <<step, open, decided>>
restoreVars == <<plan, source, loaded, verdict, restored, before>>
lifeVars == <<era, parent, chain, requested, late, wiped>>
storageVars == <<table, at, hid, listed, other>>
writerVars == <<pc, target, behind, view, doomed>>
vars == <<lifeVars, ramVars, voteVars, restoreVars, storageVars, writerVars>>

Life == (era + 1) \div 2
Training == era % 2 = 1
Kinds == {"host", "tensors", "marker"}
Nothing == [k \in Kinds |-> 0]
NoEntries == [l \in Writers |-> [n \in Steps |-> "none"]]
Base(w) == StepOf(parent[w])

Init ==
  /\ era = 1 /\ requested = FALSE /\ wiped = [l \in Lives |-> {}]
  /\ parent = [l \in Lives |-> 0] /\ chain = [l \in Lives |-> [m \in Writers |-> 0]] /\ before = 0
  /\ late \in IF OrderByClock THEN BOOLEAN ELSE {FALSE}
  /\ ram = [p \in Procs |-> {}] /\ known = [p \in Procs |-> 0]
  /\ bound = [p \in Procs |-> 0] /\ doubt = {}
  /\ step = 0 /\ open = FALSE /\ decided = [l \in Lives |-> 0]
  /\ plan = 0 /\ source = "none" /\ loaded = {} /\ verdict = FALSE
  /\ restored = [p \in Procs |-> 0]
  /\ table = [inc |-> 0, ch |-> 0, e |-> NoEntries, num |-> 0]
  /\ at = [k \in Kinds |-> [n \in Steps |-> 0]] /\ hid = {}
  /\ listed = [l \in Lives |-> 0]
  /\ other = [n |-> 0, st |-> "none", how |-> "none", early |-> FALSE]
  /\ pc = [l \in Lives |-> "new"] /\ target = [l \in Lives |-> 0]
  /\ behind = [l \in Lives |-> 0] /\ view = [l \in Lives |-> 0]
  /\ doomed = [l \in Lives |-> Nothing]

(***************************************************************************)
(* What a restore would take.                                              *)
(***************************************************************************)
\* The files of a save are all there, the tensors under the step's name or that of a hidden one.
Whole(l, n) ==
  /\ at["tensors"][n] = l \/ Save(l, n) \in hid
  /\ IF l = Plain THEN other.st = "whole" ELSE at["host"][n] = l /\ at["marker"][n] = l

\* Both markers are valid, which is all that a look at a folder shows.
Marked(l, n) == at["tensors"][n] = l /\ at["marker"][n] = l

Free(tab, n) == \A l \in Writers : tab.e[l][n] = "none"
HasEntries(tab) == \E n \in Steps : ~Free(tab, n)

\* Of two lives, that which seems to have begun later.
IsAfter(l, m) == IF late THEN l < m ELSE l > m

\* The chain on record among the hosts H, or in storage, by its life; 0: none.
ChainOf(H, reach) == Max({bound[p] : p \in H} \cup {IF reach THEN table.ch ELSE 0})

\* The number of the other program's step: as in its entry. While the log names no step, it was there
\* before every life. Beside entries, it is later than each: a start may have taken any number.
PlainNumber == IF table.e[Plain][other.n] # "none" THEN table.num
               ELSE IF HasEntries(table) THEN LastLife + 1 ELSE 0

\* The chain of life c lets a save count.
OnChain(s, c) ==
  LET l == LifeOf(s) IN
    \/ c = 0 \/ l = c
    \/ IF l = Plain THEN PlainNumber >= c ELSE IsAfter(l, c)
    \/ StepOf(s) <= chain[c][l]

\* The step of the other program stands beside a log that does not name it.
IsForeign ==
  /\ other.st = "whole" /\ at["tensors"][other.n] = Plain
  /\ table.e[Plain][other.n] = "none" /\ HasEntries(table)

CountsInStorage(l, n) ==
  /\ Whole(l, n)
  /\ \/ table.e[l][n] = "complete"
     \/ /\ Free(table, n)
        /\ IF l = Plain THEN ~IsForeign \/ ForeignCounts ELSE Marked(l, n)

InStorage ==
  {s \in {Save(l, n) : l \in Writers, n \in Steps} : CountsInStorage(LifeOf(s), StepOf(s))}
Candidates(H, reach) == UNION {ram[p] : p \in H} \cup (IF reach THEN InStorage ELSE {})

\* The newest save that counts, by what the hosts H report and, where it is in reach, storage.
Choice(H, reach) ==
  LET c == ChainOf(H, reach)
      counting == {s \in Candidates(H, reach) : OnChain(s, c)}
      newest == Max({StepOf(s) : s \in counting})
  IN IF counting = {} THEN 0 ELSE Max({s \in counting : StepOf(s) = newest})

\* A restore of the newest step ends with an error that names the step of the other program.
Ends(H) == OtherProgram /\ IsForeign /\ other.n > StepOf(Choice(H, TRUE)) /\ ~ForeignIsPassed

\* The chain of a life that begins from a save, where the chain of life b is on record.
ChainFrom(s, b) ==
  LET new == Life + 1 l == LifeOf(s) n == StepOf(s)
      HasNothingBefore == b # 0 /\ parent[b] = 0 /\ l < b
  IN [m \in Writers |->
       CASE m # Plain /\ m >= new -> Last
         [] m = Plain \/ m = l -> n
         [] l = Plain /\ m # Plain -> IF PlainNumber >= m THEN n ELSE 0
         [] l < m /\ l # Plain -> 0
         [] OTHER -> IF b \in {0, m} \/ HasNothingBefore THEN n
                     ELSE IF b < m THEN 0 ELSE Min2(n, chain[b][m])]

(***************************************************************************)
(* The vote in RAM. A process has two slots.                               *)
(***************************************************************************)
BeginVote ==
  /\ FineVote /\ Training /\ ~open /\ step < Last
  /\ step' = step + 1 /\ open' = TRUE
  /\ UNCHANGED <<decided, lifeVars, ramVars, restoreVars, storageVars, writerVars>>

\* The first save after a requested restore begins: newer steps do not count any more.
Bind(p) ==
  /\ Training /\ requested /\ step > Base(Life) /\ bound[p] # Life
  /\ bound' = [bound EXCEPT ![p] = Life]
  /\ UNCHANGED <<ram, known, doubt, voteVars, lifeVars, restoreVars, storageVars, writerVars>>

HasBegun(p) == ~requested \/ bound[p] = Life

\* A slot is written again: its save is unpublished first, the oldest. Never the newest complete
\* save, also that of a chain which life 2 leaves behind while its own is not on record.
Evict(p) ==
  /\ Training /\ open /\ p \notin doubt /\ Cardinality(ram[p]) >= 2 /\ HasBegun(p)
  /\ ram' = [ram EXCEPT ![p] = @ \ {Min(@ \ {known[p]})}]
  /\ UNCHANGED <<known, bound, doubt, voteVars, lifeVars, restoreVars, storageVars, writerVars>>

Publish(p) ==
  /\ Training /\ open /\ p \notin doubt /\ Cardinality(ram[p]) < 2 /\ HasBegun(p)
  /\ ram' = [ram EXCEPT ![p] = @ \cup {Save(Life, step)}]
  /\ doubt' = doubt \cup {p}
  /\ UNCHANGED <<known, bound, voteVars, lifeVars, restoreVars, storageVars, writerVars>>

DecideComplete ==
  /\ Training /\ open /\ \A p \in Procs : Save(Life, step) \in ram[p]
  /\ open' = FALSE /\ decided' = [decided EXCEPT ![Life] = step]
  /\ UNCHANGED <<step, lifeVars, ramVars, restoreVars, storageVars, writerVars>>

DecideIncomplete ==
  /\ Training /\ open
  /\ open' = FALSE
  /\ UNCHANGED <<step, decided, lifeVars, ramVars, restoreVars, storageVars, writerVars>>

\* The process asks for the newest complete save, and writes its ledger.
Learn(p) ==
  /\ Training /\ ~open /\ p \in doubt
  /\ doubt' = doubt \ {p}
  /\ IF decided[Life] = 0 THEN UNCHANGED <<known, bound>>
     ELSE /\ known' = [known EXCEPT ![p] = Save(Life, decided[Life])]
          /\ bound' = IF Life > 1 THEN [bound EXCEPT ![p] = Life] ELSE bound
  /\ UNCHANGED <<ram, voteVars, lifeVars, restoreVars, storageVars, writerVars>>

\* All of it in one action: the step is complete, or skipped.
SaveInRam(isSaved) ==
  /\ ~FineVote /\ Training /\ step < Last
  /\ step' = step + 1
  /\ IF ~isSaved THEN UNCHANGED <<ram, known, bound, decided>>
     ELSE /\ ram' = [p \in Procs |-> {Save(Life, step + 1)}]
          /\ known' = [p \in Procs |-> Save(Life, step + 1)]
          /\ bound' = IF Life > 1 THEN [p \in Procs |-> Life] ELSE bound
          /\ decided' = [decided EXCEPT ![Life] = step + 1]
  /\ UNCHANGED <<doubt, open, lifeVars, restoreVars, storageVars, writerVars>>

(***************************************************************************)
(* The end of a life, and the restore of the next.                         *)
(***************************************************************************)
Crash(gone) ==
  /\ Training /\ Life < LastLife
  /\ era' = era + 1 /\ open' = FALSE /\ doubt' = {} /\ step' = 0 /\ requested' = FALSE
  /\ wiped' = [l \in Lives |-> IF l <= Life THEN wiped[l] \cup gone ELSE {}]
  /\ decided' = [l \in Lives |-> IF wiped'[l] = Procs THEN 0 ELSE decided[l]]
  \* A writer that begins nothing new does not matter any more.
  /\ pc' = IF pc[Life] \in {"new", "idle"} THEN [pc EXCEPT ![Life] = "refused"] ELSE pc
  /\ ram' = [p \in Procs |-> IF p \in gone THEN {} ELSE ram[p]]
  /\ known' = [p \in Procs |-> IF p \in gone THEN 0 ELSE known[p]]
  /\ bound' = [p \in Procs |-> IF p \in gone THEN 0 ELSE bound[p]]
  /\ UNCHANGED <<parent, chain, late, restoreVars, storageVars, target, behind, view, doomed>>

Begin(s, b) ==
  /\ parent' = [parent EXCEPT ![Life + 1] = s]
  /\ chain' = [chain EXCEPT ![Life + 1] = IF s = 0 THEN [m \in Writers |->
                  IF m # Plain /\ m > Life THEN Last ELSE 0] ELSE ChainFrom(s, b)]
  /\ other' = [other EXCEPT !.early = other.st = "whole"]

Plan(s, b) ==
  /\ s # 0 /\ Begin(s, b)
  /\ plan' = s /\ before' = b
  /\ source' = IF \E p \in Procs : s \in ram[p] THEN "ram" ELSE "storage"
  /\ UNCHANGED <<loaded, verdict, restored, era, late, wiped, ramVars, voteVars, table, at, hid,
                 listed, writerVars>>

\* The leader has every report, and storage's table where it is in reach.
PlanNewest(reach) ==
  /\ ~Training /\ plan = 0 /\ ~OwnChoice /\ ~(reach /\ Ends(Procs))
  /\ Plan(Choice(Procs, reach), ChainOf(Procs, reach))
  /\ UNCHANGED requested

\* Also one that does not count: the newest, where no other has the number.
PlanRequested(n) ==
  LET c == ChainOf(Procs, TRUE)
      hidden == {s \in hid :
        table.e[LifeOf(s)][StepOf(s)] = "hidden" /\ Whole(LifeOf(s), StepOf(s))}
      found == {s \in Candidates(Procs, TRUE) \cup hidden : StepOf(s) = n}
      counting == {s \in found : OnChain(s, c)}
  IN
  /\ ~Training /\ plan = 0 /\ ~OwnChoice /\ found # {}
  /\ requested' = TRUE
  /\ Plan(Max(IF counting = {} THEN found ELSE counting), c)

HasPlanned ==
  IF source = "ram" THEN \E p \in Procs : plan \in ram[p] ELSE Whole(LifeOf(plan), StepOf(plan))

\* One fresh slot takes what is restored; no published one is changed.
Load(p) ==
  /\ ~Training /\ plan # 0 /\ ~verdict /\ p \notin loaded /\ HasPlanned
  /\ loaded' = loaded \cup {p}
  /\ ram' = [ram EXCEPT ![p] = @ \cup {plan}]
  /\ UNCHANGED <<known, bound, doubt, plan, source, verdict, restored, before, lifeVars, voteVars,
                 storageVars, writerVars>>

\* What was planned is gone: a writer of an older life has removed it. The leader plans again.
LoadFails ==
  /\ ~Training /\ plan # 0 /\ loaded # Procs /\ ~HasPlanned
  /\ plan' = 0 /\ source' = "none" /\ loaded' = {} /\ requested' = FALSE /\ before' = 0
  /\ Begin(0, 0)
  /\ UNCHANGED <<verdict, restored, era, late, wiped, ramVars, voteVars, table, at, hid, listed,
                 writerVars>>

Verdict ==
  /\ ~Training /\ plan # 0 /\ loaded = Procs /\ ~verdict
  /\ verdict' = TRUE
  /\ UNCHANGED <<plan, source, loaded, restored, before, lifeVars, ramVars, voteVars, storageVars,
                 writerVars>>

\* The process hands out what it has loaded, and writes its ledger: also the chain of the plan,
\* unless that excludes what is restored.
Take(p) ==
  /\ ~Training /\ verdict /\ restored[p] = 0
  /\ restored' = [restored EXCEPT ![p] = plan]
  /\ known' = [known EXCEPT ![p] = plan]
  /\ bound' = IF before > bound[p] /\ OnChain(plan, before) THEN [bound EXCEPT ![p] = before]
              ELSE bound
  /\ UNCHANGED <<ram, doubt, plan, source, loaded, verdict, before, lifeVars, voteVars, storageVars,
                 writerVars>>

TakeOwn(p) ==
  /\ OwnChoice /\ ~Training /\ restored[p] = 0 /\ ram[p] # {}
  /\ restored' = [restored EXCEPT ![p] = Max(ram[p])]
  /\ UNCHANGED <<plan, source, loaded, verdict, before, lifeVars, ramVars, voteVars, storageVars,
                 writerVars>>

BeginTraining ==
  /\ ~Training /\ verdict /\ \A p \in Procs : restored[p] # 0
  /\ era' = era + 1 /\ step' = StepOf(plan)
  /\ plan' = 0 /\ source' = "none" /\ loaded' = {} /\ verdict' = FALSE /\ before' = 0
  /\ restored' = [p \in Procs |-> 0]
  /\ UNCHANGED <<parent, chain, requested, late, wiped, open, decided, ramVars, storageVars,
                 writerVars>>

\* The life saves without a restore: its chain is from nothing. What it leaves behind counts until
\* that chain binds, so no process writes over the newest that it holds, also where its ledger does
\* not name it.
BeginFromNothing ==
  /\ ~Training /\ plan = 0
  /\ era' = era + 1
  /\ Begin(0, 0)
  /\ known' = [p \in Procs |-> Choice({p}, FALSE)]
  /\ UNCHANGED <<requested, late, wiped, ram, bound, doubt, voteVars, restoreVars, table, at, hid,
                 listed, writerVars>>

(***************************************************************************)
(* The log. A version is created only if it does not exist, so that of two *)
(* writers that have read the same one only one goes on. Versions are not  *)
(* counted: `behind` says how many came since the writer's read (2: or     *)
(* more). A create whose answer was lost is one that succeeded, because a  *)
(* version never changes, and the writer reads its own.                    *)
(***************************************************************************)
\* The chain of a life is binding for its writer.
IsBinding(w) == \E p \in Procs : bound[p] = w

\* A newer life is on record.
Fenced(w) == table.inc # 0 /\ table.inc # w /\ IsAfter(table.inc, w)

Seen(w) == IF NoPrecondition THEN view[w] ELSE table
Read(w) ==
  /\ behind' = [behind EXCEPT ![w] = 0]
  /\ view' = IF NoPrecondition THEN [view EXCEPT ![w] = table] ELSE view

\* A version has come: all writers but w, or all for 0, have read an older one.
Overtake(w) == behind' = [l \in Lives |-> CASE l = w -> 0
                                            [] l # w /\ pc[l] \in {"new", "refused"} -> behind[l]
                                            [] OTHER -> IF behind[l] = 0 THEN 1 ELSE 2]

Create(w, new) ==
  /\ NoPrecondition \/ behind[w] = 0
  /\ table' = IF behind[w] = 2 THEN table ELSE new
  /\ Overtake(w)
  /\ view' = IF NoPrecondition THEN [view EXCEPT ![w] = new] ELSE view

\* The table with the chain of a life: from here on it excludes what is off it. Life 1 has none.
Following(tab, w) == IF w = 1 THEN tab ELSE [tab EXCEPT !.ch = w]

\* A complete entry that the chain on record excludes: it is to be hidden.
Left(l, n) == table.ch # 0 /\ table.e[l][n] = "complete" /\ ~OnChain(Save(l, n), table.ch)

outsideVars == <<lifeVars, ramVars, voteVars, restoreVars>>
otherVars == <<outsideVars, other, doomed>>
CanWrite(w) == w <= Life
CanBegin(w) == Training /\ w = Life

\* A writer of a life that has ended begins nothing new: it was stopped in the middle of something.
Done(w) == IF CanBegin(w) THEN "idle" ELSE "refused"
Give(w, to) == pc' = [pc EXCEPT ![w] = to]
End(w, to) == Give(w, to) /\ target' = [target EXCEPT ![w] = 0]

\* A read, before any change: of the first save of a life, or after a race that was lost.
ReadLog(w) ==
  /\ FineStorage
  /\ \/ CanBegin(w) /\ pc[w] = "new" /\ (step > Base(w) \/ (w > 1 /\ IsBinding(w)))
     \/ /\ CanWrite(w) /\ behind[w] > 0 /\ ~NoPrecondition
        /\ pc[w] \in {"claim", "list", "unlist", "follow"}
  /\ IF Fenced(w) THEN End(w, "refused") /\ UNCHANGED <<behind, view>>
     ELSE /\ Read(w)
          /\ Give(w, IF pc[w] = "new" THEN "claim" ELSE pc[w])
          /\ UNCHANGED target
  /\ UNCHANGED <<storageVars, outsideVars, doomed>>

(***************************************************************************)
(* The other program. It writes one step, and commits it. The log is told: *)
(* by the first save, where it has no entry, or by `eckpt doctor --adopt`. *)
(* `how`: "beside" where it was committed while the log had an entry,      *)
(* "first" where a first save found it, "taken" where a person took it in. *)
(***************************************************************************)
OtherBegins(n) ==
  /\ OtherProgram /\ other.n = 0 /\ at["tensors"][n] = 0
  /\ other' = [other EXCEPT !.n = n, !.st = "part"]
  /\ at' = [at EXCEPT !["tensors"][n] = Plain]
  /\ UNCHANGED <<table, hid, listed, writerVars, outsideVars>>

OtherEnds ==
  /\ other.st = "part"
  /\ other' = [other EXCEPT !.st = "whole", !.how = IF HasEntries(table) THEN "beside" ELSE "alone"]
  /\ UNCHANGED <<table, at, hid, listed, writerVars, outsideVars>>

\* A first save finds it where the log has no entry.
Adopts(tab) ==
  /\ OtherProgram /\ ~AdoptsNothing /\ ~HasEntries(tab)
  /\ other.st = "whole" \/ (AdoptsUnfinished /\ other.st = "part")

\* A version beside all writers, which names no life.
Adopt ==
  /\ OtherProgram /\ IsForeign /\ Free(table, other.n)
  /\ table' = [table EXCEPT !.e[Plain][other.n] = "complete", !.num = table.inc]
  /\ other' = [other EXCEPT !.how = "taken"]
  /\ Overtake(0)
  /\ UNCHANGED <<at, hid, listed, pc, target, view, doomed, outsideVars>>

\* A version that names this life. It lists what is there with both markers and in no entry.
Claim(w) ==
  /\ CanWrite(w) /\ pc[w] = "claim"
  /\ LET tab == Seen(w)
         marked == [tab EXCEPT !.inc = w, !.e = [l \in Writers |-> [n \in Steps |->
                     IF l # Plain /\ Marked(l, n) /\ Free(tab, n) THEN "complete"
                     ELSE tab.e[l][n]]]]
         found == IF Adopts(tab)
                  THEN [marked EXCEPT !.e[Plain][other.n] = "complete",
                                      !.num = IF AdoptsAsOwn THEN w ELSE 0]
                  ELSE marked
     IN /\ Create(w, IF w > 1 /\ IsBinding(w) THEN Following(found, w) ELSE found)
        /\ other' = IF other.st = "whole" /\ ~HasEntries(tab) THEN [other EXCEPT !.how = "first"]
                    ELSE other
  /\ Give(w, Done(w))
  /\ UNCHANGED <<target, at, hid, listed, doomed, outsideVars>>

(***************************************************************************)
(* A save in storage.                                                      *)
(***************************************************************************)
Order == IF MarkerFirst THEN <<"marker", "tensors", "host">> ELSE <<"host", "tensors", "marker">>
After(k) == IF k = Order[1] THEN Order[2] ELSE IF k = Order[2] THEN Order[3] ELSE "list"

\* The place of a step that the log does not name is nobody's to clear.
IsTaken(w, n) ==
  \/ at["tensors"][n] = Plain
  \/ \E l \in Lives : l < w /\ \A k \in Kinds : at[k][n] = l

BeginSave(w, n) ==
  /\ CanBegin(w) /\ pc[w] = "idle" /\ n <= step /\ n > Base(w)
  /\ n > listed[w]
  /\ Free(table, n)  \* what counts is kept, and what is hidden goes first
  /\ target' = [target EXCEPT ![w] = Save(w, n)]
  /\ Give(w, Order[1])
  /\ UNCHANGED <<behind, view, storageVars, outsideVars, doomed>>

\* A complete step is there that no entry names: the save fails.
GiveUp(w) ==
  /\ CanBegin(w) /\ pc[w] = Order[1] /\ LifeOf(target[w]) = w
  /\ IsTaken(w, StepOf(target[w]))
  /\ End(w, "idle")
  /\ UNCHANGED <<behind, view, storageVars, outsideVars, doomed>>

(***************************************************************************)
(* A rollback. The chain goes on record; each step that it excludes is     *)
(* renamed, and a version says so then.                                    *)
(***************************************************************************)
BeginFollow(w) ==
  /\ w > 1 /\ CanBegin(w) /\ FineStorage /\ pc[w] = "idle" /\ ~Fenced(w)
  /\ IsBinding(w) /\ table.ch # w
  /\ Read(w) /\ Give(w, "follow")
  /\ UNCHANGED <<target, storageVars, outsideVars, doomed>>

Follow(w) ==
  /\ CanWrite(w) /\ pc[w] = "follow"
  /\ Create(w, Following([Seen(w) EXCEPT !.inc = w], w))
  /\ Give(w, Done(w))
  /\ UNCHANGED <<target, at, hid, listed, otherVars>>

BeginHide(w, l, n) ==
  /\ CanBegin(w) /\ pc[w] = "idle" /\ Left(l, n) /\ ~Fenced(w) /\ FineStorage
  /\ Read(w) /\ Give(w, "hide")
  /\ target' = [target EXCEPT ![w] = Save(l, n)]
  /\ UNCHANGED <<storageVars, outsideVars, doomed>>

Rename(l, n) ==
  /\ hid' = IF at["tensors"][n] = l THEN hid \cup {Save(l, n)} ELSE hid
  /\ at' = IF at["tensors"][n] = l THEN [at EXCEPT !["tensors"][n] = 0] ELSE at

Hide(w) ==
  /\ CanWrite(w) /\ pc[w] = "hide"
  /\ Rename(LifeOf(target[w]), StepOf(target[w]))
  /\ Give(w, "hidden")
  /\ UNCHANGED <<target, behind, view, table, listed, otherVars>>

MarkHidden(w) ==
  /\ CanWrite(w) /\ pc[w] = "hidden"
  /\ IF behind[w] > 0 /\ ~NoPrecondition
     THEN UNCHANGED <<table, behind, view>>
     ELSE Create(w, [Seen(w) EXCEPT !.inc = w,
                                    !.e[LifeOf(target[w])][StepOf(target[w])] = "hidden"])
  /\ End(w, Done(w))
  /\ UNCHANGED <<at, hid, listed, otherVars>>

\* The newest life removes what no entry names, a file at a time.
ClearGarbage(w, k, n) ==
  /\ LastLife = 2 /\ CanBegin(w) /\ pc[w] \notin {"new", "claim", "refused"}
  /\ at[k][n] \in 1..(w - 1) /\ table.e[at[k][n]][n] = "none"
  /\ at' = [at EXCEPT ![k][n] = 0]
  /\ UNCHANGED <<table, hid, listed, writerVars, otherVars>>

\* Likewise where another life may follow: a listing, a look at the log and deletions, as a removal.
BeginClearing(w, l, n) ==
  /\ LastLife > 2 /\ CanBegin(w) /\ pc[w] = "idle" /\ FineStorage /\ ~Fenced(w)
  /\ l < w /\ (\E k \in Kinds : at[k][n] = l) /\ ~Marked(l, n) /\ table.e[l][n] = "none"
  /\ Read(w)
  /\ target' = [target EXCEPT ![w] = Save(l, n)]
  /\ Give(w, "look")
  /\ UNCHANGED <<storageVars, outsideVars, doomed>>

\* Host states and markers are created only if absent, but that a newer life replaces an older
\* one's; Orbax's commit is a rename to a name that must be free.
Put(w, k) ==
  LET n == StepOf(target[w])
      there == at[k][n]
      isFree == there = 0 \/ (k # "tensors" /\ (there <= w \/ OlderOverwrites))
  IN
  /\ CanWrite(w) /\ pc[w] = k
  /\ ~\E l \in Lives : l < w /\ \A kind \in Kinds : at[kind][n] = l
  /\ IF isFree
     THEN /\ at' = [at EXCEPT ![k][n] = w]
          /\ Give(w, After(k)) /\ UNCHANGED target
     ELSE /\ ~CanBegin(w)  \* the save fails; the life that trains clears the place instead
          /\ End(w, "refused") /\ UNCHANGED at
  /\ UNCHANGED <<table, hid, listed, behind, view, otherVars>>

\* The step counts from here, and is reported.
ListStep(w) ==
  /\ CanWrite(w) /\ pc[w] = "list"
  /\ LET n == StepOf(target[w])
         tab == [Seen(w) EXCEPT !.inc = w, !.e[w][n] = "complete"]
     IN /\ Create(w, Following(tab, w))
        /\ listed' = [listed EXCEPT ![w] = n]
  /\ End(w, Done(w))
  /\ UNCHANGED <<at, hid, otherVars>>

(***************************************************************************)
(* Removal.                                                                *)
(***************************************************************************)
\* Retention keeps the newest step that counts.
IsSuperseded(s) == \E l \in Writers, n \in Steps :
  n > StepOf(s) /\ table.e[l][n] = "complete" /\ ~Left(l, n)

\* The job has gone on without the step: the chain on record excludes it.
IsOff(l, n) == table.e[l][n] = "hidden" \/ Left(l, n)

BeginRemoval(w, l, n) ==
  /\ CanBegin(w) /\ pc[w] = "idle" /\ FineStorage
  /\ \/ table.e[l][n] = "complete" /\ IsSuperseded(Save(l, n))
     \/ IsOff(l, n)
  /\ IF Fenced(w) THEN Give(w, "refused") /\ UNCHANGED <<target, behind, view>>
     ELSE /\ Read(w)
          /\ target' = [target EXCEPT ![w] = Save(l, n)]
          /\ Give(w, IF RemoveFirst THEN "look" ELSE "mark")
  /\ UNCHANGED <<storageVars, outsideVars, doomed>>

MarkRemoving(w) ==
  /\ CanWrite(w) /\ pc[w] = "mark"
  /\ IF behind[w] > 0 /\ ~NoPrecondition
     THEN End(w, Done(w)) /\ UNCHANGED <<table, behind, view>>
     ELSE /\ Create(w, [Seen(w) EXCEPT !.inc = w,
                                       !.e[LifeOf(target[w])][StepOf(target[w])] = "removing"])
          /\ Give(w, "look") /\ UNCHANGED target
  /\ UNCHANGED <<at, hid, listed, otherVars>>

\* A life ends what an older one had begun.
ResumeRemoval(w, l, n) ==
  /\ CanBegin(w) /\ pc[w] = "idle" /\ table.e[l][n] = "removing" /\ ~Fenced(w)
  /\ Read(w)
  /\ target' = [target EXCEPT ![w] = Save(l, n)]
  /\ Give(w, "look")
  /\ UNCHANGED <<storageVars, outsideVars, doomed>>

\* A listing says which files there are, each with its generation: here, its life.
LookForFiles(w) ==
  /\ CanWrite(w) /\ pc[w] = "look"
  /\ doomed' = [doomed EXCEPT ![w] = [k \in Kinds |-> at[k][StepOf(target[w])]]]
  /\ Give(w, IF DeletesUnchecked THEN "delete" ELSE "check")
  /\ UNCHANGED <<target, behind, view, storageVars, outsideVars>>

\* A newer life is on record before it writes: without one, no file that was listed is of its saves.
CheckLog(w) ==
  /\ CanWrite(w) /\ pc[w] = "check"
  /\ IF Fenced(w) THEN End(w, "refused") /\ doomed' = [doomed EXCEPT ![w] = Nothing]
     ELSE Give(w, "delete") /\ UNCHANGED <<target, doomed>>
  /\ UNCHANGED <<behind, view, storageVars, outsideVars>>

\* A file at a time, in any order; only those that were listed, by their generation.
DeleteFile(w, k) ==
  LET n == StepOf(target[w])
      isListed == at[k][n] = doomed[w][k] \/ DeletesByPath
  IN
  /\ CanWrite(w) /\ pc[w] = "delete" /\ doomed[w][k] # 0
  /\ at' = IF isListed THEN [at EXCEPT ![k][n] = 0] ELSE at
  /\ doomed' = [doomed EXCEPT ![w][k] = 0]
  /\ UNCHANGED <<table, hid, listed, other, pc, target, behind, view, outsideVars>>

EndDeletion(w) ==
  /\ CanWrite(w) /\ pc[w] = "delete"
  /\ doomed[w] = Nothing
  /\ hid' = hid \ {target[w]}
  /\ IF table.e[LifeOf(target[w])][StepOf(target[w])] = "none" THEN End(w, Done(w))
     ELSE Give(w, "unlist") /\ UNCHANGED target
  /\ UNCHANGED <<table, at, listed, behind, view, otherVars>>

Unlist(w) ==
  /\ CanWrite(w) /\ pc[w] = "unlist"
  /\ Create(w, [Seen(w) EXCEPT !.inc = w, !.e[LifeOf(target[w])][StepOf(target[w])] = "none"])
  /\ End(w, Done(w))
  /\ UNCHANGED <<at, hid, listed, otherVars>>

\* A whole save, or a whole removal, of a life that trains, in one action.
SaveInStorage(w, n) ==
  /\ ~FineStorage /\ CanBegin(w) /\ ~Fenced(w)
  /\ n <= step /\ n > Base(w) /\ n > listed[w]
  \* What is off the chain is removed first; what counts is kept.
  /\ \A l \in Lives : table.e[l][n] = "complete" =>
       (IsBinding(w) \/ table.ch = w) /\ ~OnChain(Save(l, n), w)
  /\ LET e == [l \in Lives |-> [table.e[l] EXCEPT ![n] = IF l = w THEN "complete" ELSE "none"]]
     IN table' = Following([table EXCEPT !.inc = w, !.e = e], w)
  /\ hid' = {s \in hid : StepOf(s) # n}
  /\ at' = [k \in Kinds |-> [at[k] EXCEPT ![n] = w]]
  /\ listed' = [listed EXCEPT ![w] = n]
  /\ UNCHANGED <<writerVars, other, outsideVars>>

HideInStorage(w, l, n) ==
  /\ ~FineStorage /\ CanBegin(w) /\ Left(l, n) /\ ~Fenced(w)
  /\ Rename(l, n)
  /\ table' = [table EXCEPT !.e[l][n] = "hidden"]
  /\ UNCHANGED <<listed, writerVars, other, outsideVars>>

RemoveInStorage(w, l, n) ==
  /\ ~FineStorage /\ CanBegin(w) /\ ~Fenced(w) /\ table.inc = w
  /\ table.e[l][n] = "complete" /\ IsSuperseded(Save(l, n))
  /\ table' = [table EXCEPT !.e[l][n] = "none"]
  /\ hid' = hid \ {Save(l, n)}
  /\ at' = [k \in Kinds |-> [at[k] EXCEPT ![n] = IF @ = l THEN 0 ELSE @]]
  /\ UNCHANGED <<listed, writerVars, other, outsideVars>>

Next ==
  \/ \E isSaved \in BOOLEAN : SaveInRam(isSaved)
  \/ \E w \in Lives, n \in Steps : SaveInStorage(w, n) \/ BeginSave(w, n)
  \/ BeginVote \/ DecideComplete \/ DecideIncomplete
  \/ \E p \in Procs : Bind(p) \/ Evict(p) \/ Publish(p) \/ Learn(p)
                      \/ Load(p) \/ Take(p) \/ TakeOwn(p)
  \/ \E gone \in SUBSET Procs : Crash(gone)
  \/ \E reach \in BOOLEAN : PlanNewest(reach)
  \/ \E n \in Steps : PlanRequested(n) \/ OtherBegins(n)
  \/ LoadFails \/ Verdict \/ BeginTraining \/ BeginFromNothing \/ OtherEnds \/ Adopt
  \/ \E w \in Lives : ReadLog(w) \/ Claim(w) \/ ListStep(w) \/ MarkRemoving(w)
                      \/ LookForFiles(w) \/ CheckLog(w) \/ EndDeletion(w) \/ Unlist(w)
                      \/ GiveUp(w) \/ BeginFollow(w) \/ Follow(w) \/ Hide(w) \/ MarkHidden(w)
  \/ \E w \in Lives, k \in Kinds : Put(w, k) \/ DeleteFile(w, k)
  \/ \E w \in Lives, k \in Kinds, n \in Steps : ClearGarbage(w, k, n)
  \/ \E w \in Lives, l \in Writers, n \in Steps :
       BeginRemoval(w, l, n) \/ ResumeRemoval(w, l, n) \/ BeginHide(w, l, n)
       \/ BeginClearing(w, l, n) \/ RemoveInStorage(w, l, n) \/ HideInStorage(w, l, n)

Spec == Init /\ [][Next]_vars
Symmetry == {f \in [Procs -> Procs] : \A p, q \in Procs : p # q => f[p] # f[q]}

(***************************************************************************)
(* States that differ in what nothing depends on any more are one.         *)
(***************************************************************************)
\* The writer of a life that is over has been overtaken, and touches no file before it learns so.
IsOver(w) ==
  \/ pc[w] = "refused"
  \/ /\ ~NoPrecondition /\ ~CanBegin(w) /\ behind[w] > 0 /\ Fenced(w)
     /\ pc[w] \in {"claim", "list", "unlist", "mark", "follow", "hidden"}
                  \cup (IF DeletesUnchecked THEN {} ELSE {"look", "check"})

Writer(w) ==
  IF IsOver(w) THEN <<>>
  ELSE <<pc[w], target[w], view[w], doomed[w],
         IF NoPrecondition THEN behind[w] ELSE Min2(behind[w], 1)>>

Essence ==
  <<era, parent, chain, before, late, ram, bound, doubt, voteVars, storageVars,
    plan, source, loaded, verdict, restored,
    requested /\ ~(Training /\ \A p \in Procs : bound[p] = Life),
    [l \in Lives |-> IF decided[l] = 0 THEN {} ELSE wiped[l]],
    [p \in Procs |-> IF Training /\ FineVote /\ known[p] \in ram[p] THEN known[p] ELSE 0],
    [l \in Lives |-> Writer(l)]>>

(***************************************************************************)
(* What must hold.                                                         *)
(***************************************************************************)
Hosts == SUBSET Procs \ {{}}

\* The newest step that a restore by the hosts H must find, by the chain of life c.
Reported(H, reach, c) ==
  LET Limit(l) == IF c = 0 THEN Last ELSE chain[c][l] IN
  Max(UNION {{IF H \ wiped[l] # {} THEN Min2(decided[l], Limit(l)) ELSE 0,
              IF reach /\ listed[l] <= Limit(l) THEN listed[l] ELSE 0} : l \in Lives})

\* A restore finds a save that counts, of step r or a newer one.
Finds(H, reach, c, r) ==
  \/ \E p \in H : \E s \in ram[p] : StepOf(s) >= r /\ OnChain(s, c)
  \/ reach /\ \E l \in Writers, n \in r..Last : OnChain(Save(l, n), c) /\ CountsInStorage(l, n)

\* No step that was reported complete is lost while a holder of each part lives.
NothingIsLost == \A H \in Hosts, reach \in BOOLEAN :
  LET c == ChainOf(H, reach) r == Reported(H, reach, c) IN r = 0 \/ Finds(H, reach, c, r)

\* No two processes restore different steps.
OneStepIsRestored == \A p, q \in Procs :
  restored[p] = 0 \/ restored[q] = 0 \/ restored[p] = restored[q]

\* A rolled-back step does not return, where the rollback is on record. By the order of lives as
\* it was, not as it seems; of the other program, a step that a first save has adopted, and that was
\* there when the life began.
RolledBackStaysAway == OrderByClock \/ OtherProgram => \A H \in Hosts, reach \in BOOLEAN :
  LET s == Choice(H, reach) c == ChainOf(H, reach) l == LifeOf(s) IN
    \/ s = 0 \/ c = 0 \/ StepOf(s) <= chain[c][l]
    \/ IF l = Plain THEN ~other.early \/ other.how = "taken" \/ table.e[l][other.n] = "none"
       ELSE l >= c

\* The log is never behind what was removed. Of three lives, not so of a step that a claim took in by
\* its markers and nobody reported: of two writers that wake up, one may have changed its host states.
LogIsNotBehind == \A l \in Writers, n \in Steps :
  table.e[l][n] = "complete" => Whole(l, n) \/ (LastLife > 2 /\ l # Plain /\ n > listed[l])

\* What another program has written before the first save counts without a person; what it writes
\* beside the log is neither restored nor passed over before a person has taken it in.
OtherIsAdopted == OtherProgram =>
  /\ other.how = "first" => ~IsForeign
  /\ other.how = "beside" /\ IsForeign => \A H \in Hosts :
       LET s == Choice(H, TRUE) IN LifeOf(s) # Plain /\ (StepOf(s) < other.n => Ends(H))
=============================================================================
