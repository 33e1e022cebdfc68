------------------------------ MODULE StepLog ------------------------------
(***************************************************************************)
(* The step log, the vote in RAM, removal, rollback and a restore: which   *)
(* step counts, for two lives of a job. verification/model/README.md says what is *)
(* checked, within which bounds, and what it costs.                        *)
(*                                                                         *)
(* Life 1 trains, saves in RAM and in storage, and ends at any moment; any *)
(* hosts lose their RAM. Its writer in storage may go on at any later      *)
(* moment, from wherever it was: a process that was stopped, or that the   *)
(* supervisor has not found yet. Life 2 restores, by the newest step or a  *)
(* requested one, or starts without a restore; it trains and saves.        *)
(*                                                                         *)
(* Each action is one that is atomic outside too: the creation of a file,  *)
(* a rename, a decision that is set once. A crash between any two actions  *)
(* needs no action of its own in life 2: the invariants say of each state  *)
(* what a restore would take by the RAM of any of the hosts, with storage  *)
(* and without.                                                            *)
(*                                                                         *)
(* A save is 10 * life + step. Life 0 and save 0: none.                    *)
(***************************************************************************)
EXTENDS Naturals, FiniteSets

CONSTANTS
  Procs,           \* the processes of the job, each on its host; each holds the whole state
  Last,            \* the last step
  FineVote,        \* a vote in RAM goes by single actions; FALSE: a save in RAM is one action
  FineStorage,     \* likewise the writers in storage
  \* Defects. Each is FALSE in the sound model.
  NoPrecondition,  \* a version is written whether it exists or not
  OrderByClock,    \* lives are ordered by clocks, and the clock of life 2 may be behind
  MarkerFirst,     \* marker.json and Orbax's commit are written before the host states
  RemoveFirst,     \* the files of a step are deleted before a version says `removing`
  OwnChoice,       \* each process restores what its own RAM has, without a verdict
  OlderOverwrites, \* a marker or a host state replaces that of a newer life
  DeletesByPath,   \* a deletion takes the file of a name that was listed, whoever's it is by now
  DeletesUnchecked \* a deletion does not read the log after it has listed files

Steps == 1..Last
Lives == {1, 2}
Save(l, n) == 10 * l + n
LifeOf(s) == s \div 10
StepOf(s) == s % 10
Max(S) == CHOOSE x \in S : \A y \in S : y <= x
Min(S) == CHOOSE x \in S : \A y \in S : y >= x
Min2(a, b) == IF a < b THEN a ELSE b

VARIABLES
  era,       \* 1: life 1 trains; 2: it has ended, life 2 has not begun; 3: life 2 trains
  base,      \* the step of life 1 from which life 2 began; 0: from nothing
  requested, \* TRUE when the user requested that step: the chain binds as the next save begins
  late,      \* the clock of life 2 is behind (OrderByClock)
  wiped,     \* hosts that lost their RAM between the lives
  \* In RAM, for each process.
  ram,       \* published saves
  known,     \* ledger: the newest complete save
  bound,     \* processes whose ledger has the chain of life 2
  doubt,     \* processes that have published and do not know the decision
  \* The vote of the life that trains.
  step,      \* the step of the latest vote
  open,      \* the vote has no decision yet
  decided,   \* for each life, the newest step that was decided to be complete: reported
  \* The restore of life 2.
  plan, source, loaded, verdict, restored,
  \* Storage.
  table,     \* the newest version: inc, the life on record; ch, the head of the chain; e, entries
  at,        \* for each kind of file and step, the life whose files are in its folder
  hid,       \* steps of life 1 whose tensors were renamed to `<step>.rolled-back-<incarnation>`
  listed,    \* for each life, the newest step that a version listed: reported
  \* The writer of each life in storage.
  pc, target, behind, view,
  doomed     \* for each life and kind of file, the life whose file a removal has listed, and deletes

ramVars == <<ram, known, bound, doubt>>
voteVars == <<step, open, decided>>
restoreVars == <<plan, source, loaded, verdict, restored>>
lifeVars == <<era, base, requested, late, wiped>>
storageVars == <<table, at, hid, listed>>
writerVars == <<pc, target, behind, view, doomed>>
vars == <<lifeVars, ramVars, voteVars, restoreVars, storageVars, writerVars>>

Life == IF era = 3 THEN 2 ELSE 1
Training == era # 2
Kinds == {"host", "tensors", "marker"}
Nothing == [k \in Kinds |-> 0]
NoEntries == [l \in Lives |-> [n \in Steps |-> "none"]]

Init ==
  /\ era = 1 /\ base = 0 /\ requested = FALSE /\ wiped = {}
  /\ late \in IF OrderByClock THEN BOOLEAN ELSE {FALSE}
  /\ ram = [p \in Procs |-> {}] /\ known = [p \in Procs |-> 0] /\ bound = {} /\ doubt = {}
  /\ step = 0 /\ open = FALSE /\ decided = [l \in Lives |-> 0]
  /\ plan = 0 /\ source = "none" /\ loaded = {} /\ verdict = FALSE
  /\ restored = [p \in Procs |-> 0]
  /\ table = [inc |-> 0, ch |-> 0, e |-> NoEntries]
  /\ at = [k \in Kinds |-> [n \in Steps |-> 0]] /\ hid = {}
  /\ listed = [l \in Lives |-> 0]
  /\ pc = [l \in Lives |-> "new"] /\ target = [l \in Lives |-> 0]
  /\ behind = [l \in Lives |-> 0] /\ view = [l \in Lives |-> 0]
  /\ doomed = [l \in Lives |-> Nothing]

(***************************************************************************)
(* What a restore would take.                                              *)
(***************************************************************************)
\* The files of a save are all there, the tensors under the step's name or that of a hidden one.
Whole(l, n) ==
  /\ at["host"][n] = l /\ at["marker"][n] = l
  /\ at["tensors"][n] = l \/ (l = 1 /\ n \in hid)

\* Both markers are valid, which is all that a look at a folder shows.
Marked(l, n) == at["tensors"][n] = l /\ at["marker"][n] = l

\* The chain of life 2 is on record among the hosts H, or in storage.
ChainKnown(H, reach) == H \cap bound # {} \/ (reach /\ table.ch = 2)

\* A save is not off the chain; `after` says whether life 1 seems to come after life 2.
OnChain(s, isKnown, after) ==
  LifeOf(s) = 2 \/ ~isKnown \/ after \/ StepOf(s) <= base

InStorage == {s \in {Save(l, n) : l \in Lives, n \in Steps} :
  LET l == LifeOf(s) n == StepOf(s) IN
    /\ Whole(l, n)
    /\ \/ table.e[l][n] = "complete"
       \/ table.e[l][n] = "none" /\ Marked(l, n)}

Candidates(H, reach) == UNION {ram[p] : p \in H} \cup (IF reach THEN InStorage ELSE {})

\* The newest save that counts, by what the hosts H report and, where it is in reach, storage.
Choice(H, reach) ==
  LET isKnown == ChainKnown(H, reach)
      found == {s \in Candidates(H, reach) : OnChain(s, isKnown, late)}
      newest == Max({StepOf(s) : s \in found})
  IN IF found = {} THEN 0 ELSE Max({s \in found : StepOf(s) = newest})

(***************************************************************************)
(* The vote in RAM. A process has two slots.                               *)
(***************************************************************************)
BeginVote ==
  /\ FineVote /\ Training /\ ~open /\ step < Last
  /\ step' = step + 1 /\ open' = TRUE
  /\ UNCHANGED <<decided, lifeVars, ramVars, restoreVars, storageVars, writerVars>>

\* The first save after a requested restore begins: newer steps do not count any more.
Bind(p) ==
  /\ era = 3 /\ requested /\ step > base /\ p \notin bound
  /\ bound' = bound \cup {p}
  /\ UNCHANGED <<ram, known, doubt, voteVars, lifeVars, restoreVars, storageVars, writerVars>>

HasBegun(p) == era # 3 \/ ~requested \/ p \in bound

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
          /\ bound' = IF Life = 2 THEN bound \cup {p} ELSE bound
  /\ UNCHANGED <<ram, voteVars, lifeVars, restoreVars, storageVars, writerVars>>

\* All of it in one action: the step is complete, or skipped.
SaveInRam(isSaved) ==
  /\ ~FineVote /\ Training /\ step < Last
  /\ step' = step + 1
  /\ IF ~isSaved THEN UNCHANGED <<ram, known, bound, decided>>
     ELSE /\ ram' = [p \in Procs |-> {Save(Life, step + 1)}]
          /\ known' = [p \in Procs |-> Save(Life, step + 1)]
          /\ bound' = IF Life = 2 THEN Procs ELSE bound
          /\ decided' = [decided EXCEPT ![Life] = step + 1]
  /\ UNCHANGED <<doubt, open, lifeVars, restoreVars, storageVars, writerVars>>

(***************************************************************************)
(* The end of life 1, and the restore of life 2.                           *)
(***************************************************************************)
Crash(gone) ==
  /\ era = 1
  /\ era' = 2 /\ wiped' = gone /\ open' = FALSE /\ doubt' = {} /\ step' = 0
  /\ decided' = IF gone = Procs THEN [decided EXCEPT ![1] = 0] ELSE decided
  \* A writer that begins nothing new does not matter any more.
  /\ pc' = IF pc[1] \in {"new", "idle"} THEN [pc EXCEPT ![1] = "refused"] ELSE pc
  /\ ram' = [p \in Procs |-> IF p \in gone THEN {} ELSE ram[p]]
  /\ known' = [p \in Procs |-> IF p \in gone THEN 0 ELSE known[p]]
  /\ UNCHANGED <<base, requested, late, bound, restoreVars, storageVars, target, behind, view, doomed>>

\* The leader has every report, and storage's table where it is in reach.
PlanNewest(reach) ==
  /\ era = 2 /\ plan = 0 /\ ~OwnChoice
  /\ LET s == Choice(Procs, reach) IN
       /\ s # 0
       /\ plan' = StepOf(s)
       /\ source' = IF \E p \in Procs : s \in ram[p] THEN "ram" ELSE "storage"
  /\ UNCHANGED <<loaded, verdict, restored, lifeVars, ramVars, voteVars, storageVars, writerVars>>

PlanRequested(n) ==
  /\ era = 2 /\ plan = 0 /\ ~OwnChoice
  /\ Save(1, n) \in Candidates(Procs, TRUE)
  /\ plan' = n /\ requested' = TRUE
  /\ source' = IF \E p \in Procs : Save(1, n) \in ram[p] THEN "ram" ELSE "storage"
  /\ UNCHANGED <<loaded, verdict, restored, era, base, late, wiped, ramVars, voteVars,
                 storageVars, writerVars>>

HasPlanned == IF source = "ram" THEN \E p \in Procs : Save(1, plan) \in ram[p] ELSE Whole(1, plan)

\* One fresh slot takes what is restored; no published one is changed.
Load(p) ==
  /\ era = 2 /\ plan # 0 /\ ~verdict /\ p \notin loaded /\ HasPlanned
  /\ loaded' = loaded \cup {p}
  /\ ram' = [ram EXCEPT ![p] = @ \cup {Save(1, plan)}]
  /\ UNCHANGED <<known, bound, doubt, plan, source, verdict, restored, lifeVars, voteVars,
                 storageVars, writerVars>>

\* What was planned is gone: the writer of life 1 has removed it. The leader plans again.
LoadFails ==
  /\ era = 2 /\ plan # 0 /\ loaded # Procs /\ ~HasPlanned
  /\ plan' = 0 /\ source' = "none" /\ loaded' = {} /\ requested' = FALSE
  /\ UNCHANGED <<verdict, restored, era, base, late, wiped, ramVars, voteVars, storageVars,
                 writerVars>>

Verdict ==
  /\ era = 2 /\ plan # 0 /\ loaded = Procs /\ ~verdict
  /\ verdict' = TRUE /\ base' = plan
  /\ UNCHANGED <<plan, source, loaded, restored, era, requested, late, wiped, ramVars, voteVars,
                 storageVars, writerVars>>

\* The process hands out what it has loaded, and writes its ledger.
Take(p) ==
  /\ era = 2 /\ verdict /\ restored[p] = 0
  /\ restored' = [restored EXCEPT ![p] = plan]
  /\ known' = [known EXCEPT ![p] = Save(1, plan)]
  /\ UNCHANGED <<ram, bound, doubt, plan, source, loaded, verdict, lifeVars, voteVars, storageVars,
                 writerVars>>

TakeOwn(p) ==
  /\ OwnChoice /\ era = 2 /\ restored[p] = 0 /\ ram[p] # {}
  /\ restored' = [restored EXCEPT ![p] = StepOf(Max(ram[p]))]
  /\ UNCHANGED <<plan, source, loaded, verdict, lifeVars, ramVars, voteVars, storageVars,
                 writerVars>>

BeginTraining ==
  /\ era = 2 /\ verdict /\ \A p \in Procs : restored[p] # 0
  /\ era' = 3 /\ step' = plan
  /\ plan' = 0 /\ source' = "none" /\ loaded' = {} /\ verdict' = FALSE
  /\ restored' = [p \in Procs |-> 0]
  /\ UNCHANGED <<base, requested, late, wiped, open, decided, ramVars, storageVars, writerVars>>

\* Life 2 saves without a restore: its chain is from nothing. What it leaves behind counts until
\* that chain binds, so no process writes over the newest that it holds, also where its ledger does
\* not name it.
BeginFromNothing ==
  /\ era = 2 /\ plan = 0
  /\ era' = 3
  /\ known' = [p \in Procs |-> IF ram[p] = {} THEN 0 ELSE Max(ram[p])]
  /\ UNCHANGED <<base, requested, late, wiped, ram, bound, doubt, voteVars, restoreVars,
                 storageVars, writerVars>>

(***************************************************************************)
(* The log. A version is created only if it does not exist, so that of two *)
(* writers that have read the same one only one goes on. Versions are not  *)
(* counted: `behind` says how many came since the writer's read (2: or     *)
(* more). A create whose answer was lost is one that succeeded, because a  *)
(* version never changes, and the writer reads its own.                    *)
(***************************************************************************)
\* Life 2's chain is binding for its writer.
IsBinding == bound # {}

\* A newer life is on record.
Fenced(w) == table.inc # 0 /\ table.inc # w /\ (IF late THEN w = 2 ELSE w = 1)

Seen(w) == IF NoPrecondition THEN view[w] ELSE table
Read(w) ==
  /\ behind' = [behind EXCEPT ![w] = 0]
  /\ view' = IF NoPrecondition THEN [view EXCEPT ![w] = table] ELSE view

Create(w, new) ==
  /\ NoPrecondition \/ behind[w] = 0
  /\ table' = IF behind[w] = 2 THEN table ELSE new
  /\ behind' = [l \in Lives |-> CASE l = w -> 0
                                   [] l # w /\ pc[l] \in {"new", "refused"} -> behind[l]
                                   [] OTHER -> IF behind[l] = 0 THEN 1 ELSE 2]
  /\ view' = IF NoPrecondition THEN [view EXCEPT ![w] = new] ELSE view

\* The table with the chain of life 2: from here on it excludes what is off it.
Following(tab) == [tab EXCEPT !.ch = 2]

\* A complete entry that the chain on record excludes: it is to be hidden.
Left(n) == table.ch = 2 /\ table.e[1][n] = "complete" /\ n > base /\ ~late

outsideVars == <<lifeVars, ramVars, voteVars, restoreVars>>
otherVars == <<outsideVars, doomed>>
CanWrite(w) == IF w = 1 THEN TRUE ELSE era = 3
CanBegin(w) == IF w = 1 THEN era = 1 ELSE era = 3

\* A writer of a life that has ended begins nothing new: it was stopped in the middle of something.
Done(w) == IF CanBegin(w) THEN "idle" ELSE "refused"
Give(w, to) == pc' = [pc EXCEPT ![w] = to]
End(w, to) == Give(w, to) /\ target' = [target EXCEPT ![w] = 0]

\* A read, before any change: of the first save of a life, or after a race that was lost.
ReadLog(w) ==
  /\ FineStorage
  /\ \/ CanBegin(w) /\ pc[w] = "new" /\ (step > base \/ IsBinding)
     \/ CanWrite(w) /\ pc[w] \in {"claim", "list", "unlist", "follow"} /\ behind[w] > 0 /\ ~NoPrecondition
  /\ IF Fenced(w) THEN End(w, "refused") /\ UNCHANGED <<behind, view>>
     ELSE /\ Read(w)
          /\ Give(w, IF pc[w] = "new" THEN "claim" ELSE pc[w])
          /\ UNCHANGED target
  /\ UNCHANGED <<storageVars, otherVars>>

\* A version that names this life. It lists what is there with both markers and in no entry.
Claim(w) ==
  /\ CanWrite(w) /\ pc[w] = "claim"
  /\ LET found == [Seen(w) EXCEPT !.inc = w, !.e = [l \in Lives |-> [n \in Steps |->
                     IF Seen(w).e[l][n] = "none" /\ Marked(l, n) THEN "complete"
                     ELSE Seen(w).e[l][n]]]]
     IN Create(w, IF w = 2 /\ IsBinding THEN Following(found) ELSE found)
  /\ Give(w, Done(w))
  /\ UNCHANGED <<target, at, hid, listed, otherVars>>

(***************************************************************************)
(* A save in storage.                                                      *)
(***************************************************************************)
Order == IF MarkerFirst THEN <<"marker", "tensors", "host">> ELSE <<"host", "tensors", "marker">>
After(k) == IF k = Order[1] THEN Order[2] ELSE IF k = Order[2] THEN Order[3] ELSE "list"

BeginSave(w, n) ==
  /\ CanBegin(w) /\ pc[w] = "idle" /\ n <= step /\ n > (IF w = 2 THEN base ELSE 0)
  /\ n > listed[w]
  /\ table.e[1][n] = "none"  \* what counts is kept, and what is hidden goes first
  /\ target' = [target EXCEPT ![w] = Save(w, n)]
  /\ Give(w, Order[1])
  /\ UNCHANGED <<behind, view, storageVars, otherVars>>

\* A complete step is there that no entry names: it is nobody's to remove, and the save fails.
GiveUp ==
  /\ pc[2] = Order[1] /\ LifeOf(target[2]) = 2
  /\ \A k \in Kinds : at[k][StepOf(target[2])] = 1
  /\ End(2, "idle")
  /\ UNCHANGED <<behind, view, storageVars, otherVars>>

(***************************************************************************)
(* A rollback. The chain goes on record; each step that it excludes is     *)
(* renamed, and a version says so then.                                    *)
(***************************************************************************)
BeginFollow ==
  /\ era = 3 /\ FineStorage /\ pc[2] = "idle" /\ IsBinding /\ table.ch # 2 /\ ~Fenced(2)
  /\ Read(2) /\ Give(2, "follow")
  /\ UNCHANGED <<target, storageVars, otherVars>>

Follow ==
  /\ pc[2] = "follow"
  /\ Create(2, Following([Seen(2) EXCEPT !.inc = 2]))
  /\ Give(2, "idle")
  /\ UNCHANGED <<target, at, hid, listed, otherVars>>

BeginHide(n) ==
  /\ era = 3 /\ pc[2] = "idle" /\ Left(n) /\ ~Fenced(2)
  /\ Read(2) /\ Give(2, "hide")
  /\ target' = [target EXCEPT ![2] = Save(1, n)]
  /\ UNCHANGED <<storageVars, otherVars>>

Rename(n) ==
  /\ hid' = IF at["tensors"][n] = 1 THEN hid \cup {n} ELSE hid
  /\ at' = IF at["tensors"][n] = 1 THEN [at EXCEPT !["tensors"][n] = 0] ELSE at

Hide ==
  /\ pc[2] = "hide"
  /\ Rename(StepOf(target[2]))
  /\ Give(2, "hidden")
  /\ UNCHANGED <<target, behind, view, table, listed, otherVars>>

MarkHidden ==
  /\ pc[2] = "hidden"
  /\ IF behind[2] > 0 /\ ~NoPrecondition
     THEN UNCHANGED <<table, behind, view>>
     ELSE Create(2, [Seen(2) EXCEPT !.inc = 2, !.e[1][StepOf(target[2])] = "hidden"])
  /\ End(2, "idle")
  /\ UNCHANGED <<at, hid, listed, otherVars>>

\* The newest life removes what no entry names, a file at a time.
ClearGarbage(k, n) ==
  /\ pc[2] \notin {"new", "claim", "refused"}
  /\ at[k][n] = 1 /\ table.e[1][n] = "none"
  /\ at' = [at EXCEPT ![k][n] = 0]
  /\ UNCHANGED <<table, hid, listed, writerVars, otherVars>>

\* Host states and markers are created only if absent, but that a newer life replaces an older
\* one's; Orbax's commit is a rename to a name that must be free.
Put(w, k) ==
  LET n == StepOf(target[w])
      there == at[k][n]
      isFree == there = 0 \/ (k # "tensors" /\ (there <= w \/ OlderOverwrites))
  IN
  /\ CanWrite(w) /\ pc[w] = k
  /\ w = 2 => ~\A other \in Kinds : at[other][n] = 1
  /\ IF isFree
     THEN /\ at' = [at EXCEPT ![k][n] = w]
          /\ Give(w, After(k)) /\ UNCHANGED target
     ELSE /\ w = 1  \* the save fails; the newer life clears the place instead
          /\ End(w, "refused") /\ UNCHANGED at
  /\ UNCHANGED <<table, hid, listed, behind, view, otherVars>>

\* The step counts from here, and is reported.
ListStep(w) ==
  /\ CanWrite(w) /\ pc[w] = "list"
  /\ LET n == StepOf(target[w])
         tab == [Seen(w) EXCEPT !.inc = w, !.e[w][n] = "complete"]
     IN /\ Create(w, IF w = 2 THEN Following(tab) ELSE tab)
        /\ listed' = [listed EXCEPT ![w] = n]
  /\ End(w, Done(w))
  /\ UNCHANGED <<at, hid, otherVars>>

(***************************************************************************)
(* Removal.                                                                *)
(***************************************************************************)
\* Retention keeps the newest step that counts.
IsSuperseded(s) == \E l \in Lives, n \in Steps :
  n > StepOf(s) /\ table.e[l][n] = "complete" /\ ~(l = 1 /\ Left(n))

\* The job has gone on without the step: the chain on record excludes it.
IsOff(s) == LifeOf(s) = 1 /\ (table.e[1][StepOf(s)] = "hidden" \/ Left(StepOf(s)))

BeginRemoval(w, s) ==
  /\ CanBegin(w) /\ pc[w] = "idle"
  /\ \/ table.e[LifeOf(s)][StepOf(s)] = "complete" /\ IsSuperseded(s)
     \/ w = 2 /\ IsOff(s)
  /\ IF Fenced(w) THEN Give(w, "refused") /\ UNCHANGED <<target, behind, view>>
     ELSE /\ Read(w)
          /\ target' = [target EXCEPT ![w] = s]
          /\ Give(w, IF RemoveFirst THEN "look" ELSE "mark")
  /\ UNCHANGED <<storageVars, otherVars>>

MarkRemoving(w) ==
  /\ CanWrite(w) /\ pc[w] = "mark"
  /\ IF behind[w] > 0 /\ ~NoPrecondition
     THEN End(w, Done(w)) /\ UNCHANGED <<table, behind, view>>
     ELSE /\ Create(w, [Seen(w) EXCEPT !.inc = w,
                                       !.e[LifeOf(target[w])][StepOf(target[w])] = "removing"])
          /\ Give(w, "look") /\ UNCHANGED target
  /\ UNCHANGED <<at, hid, listed, otherVars>>

\* Life 2 ends what life 1 had begun.
ResumeRemoval(s) ==
  /\ era = 3 /\ pc[2] = "idle" /\ table.e[LifeOf(s)][StepOf(s)] = "removing" /\ ~Fenced(2)
  /\ Read(2)
  /\ target' = [target EXCEPT ![2] = s]
  /\ Give(2, "look")
  /\ UNCHANGED <<storageVars, otherVars>>

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
  /\ UNCHANGED <<table, hid, listed, pc, target, behind, view, outsideVars>>

EndDeletion(w) ==
  LET l == LifeOf(target[w]) n == StepOf(target[w]) IN
  /\ CanWrite(w) /\ pc[w] = "delete"
  /\ doomed[w] = Nothing
  /\ hid' = IF l = 1 THEN hid \ {n} ELSE hid
  /\ Give(w, "unlist")
  /\ UNCHANGED <<table, at, listed, target, behind, view, otherVars>>

Unlist(w) ==
  /\ CanWrite(w) /\ pc[w] = "unlist"
  /\ Create(w, [Seen(w) EXCEPT !.inc = w, !.e[LifeOf(target[w])][StepOf(target[w])] = "none"])
  /\ End(w, Done(w))
  /\ UNCHANGED <<at, hid, listed, otherVars>>

\* A whole save, or a whole removal, of a life that trains, in one action.
SaveInStorage(w, n) ==
  /\ ~FineStorage /\ CanBegin(w) /\ ~Fenced(w)
  /\ n <= step /\ n > (IF w = 2 THEN base ELSE 0) /\ n > listed[w]
  \* What is off the chain is removed first; what counts is kept.
  /\ table.e[1][n] = "complete" => (IsBinding \/ table.ch = 2) /\ ~late
  /\ LET tab == [table EXCEPT !.inc = w, !.e[1][n] = "none", !.e[w][n] = "complete"]
     IN table' = IF w = 2 THEN Following(tab) ELSE tab
  /\ hid' = hid \ {n}
  /\ at' = [k \in Kinds |-> [at[k] EXCEPT ![n] = w]]
  /\ listed' = [listed EXCEPT ![w] = n]
  /\ UNCHANGED <<writerVars, otherVars>>

HideInStorage(n) ==
  /\ ~FineStorage /\ era = 3 /\ Left(n)
  /\ Rename(n)
  /\ table' = [table EXCEPT !.e[1][n] = "hidden"]
  /\ UNCHANGED <<listed, writerVars, otherVars>>

RemoveInStorage(w, s) ==
  LET l == LifeOf(s) n == StepOf(s) IN
  /\ ~FineStorage /\ CanBegin(w) /\ ~Fenced(w) /\ table.inc = w
  /\ table.e[l][n] = "complete" /\ IsSuperseded(s)
  /\ table' = [table EXCEPT !.e[l][n] = "none"]
  /\ hid' = IF l = 1 THEN hid \ {n} ELSE hid
  /\ at' = [k \in Kinds |-> [at[k] EXCEPT ![n] = IF @ = l THEN 0 ELSE @]]
  /\ UNCHANGED <<listed, writerVars, otherVars>>

Next ==
  \/ \E isSaved \in BOOLEAN : SaveInRam(isSaved)
  \/ \E w \in Lives, n \in Steps : SaveInStorage(w, n)
  \/ \E w \in Lives, l \in Lives, n \in Steps : RemoveInStorage(w, Save(l, n))
  \/ BeginVote \/ DecideComplete \/ DecideIncomplete
  \/ \E p \in Procs : Bind(p) \/ Evict(p) \/ Publish(p) \/ Learn(p) \/ Load(p) \/ Take(p) \/ TakeOwn(p)
  \/ \E gone \in SUBSET Procs : Crash(gone)
  \/ \E reach \in BOOLEAN : PlanNewest(reach)
  \/ \E n \in Steps : PlanRequested(n) \/ BeginHide(n) \/ HideInStorage(n)
  \/ GiveUp \/ BeginFollow \/ Follow \/ Hide \/ MarkHidden
  \/ LoadFails \/ Verdict \/ BeginTraining \/ BeginFromNothing
  \/ \E w \in Lives : ReadLog(w) \/ Claim(w) \/ ListStep(w) \/ MarkRemoving(w)
                      \/ LookForFiles(w) \/ CheckLog(w) \/ EndDeletion(w) \/ Unlist(w)
  \/ \E w \in Lives, n \in Steps : BeginSave(w, n)
  \/ \E w \in Lives, k \in Kinds : Put(w, k) \/ DeleteFile(w, k)
  \/ \E k \in Kinds, n \in Steps : ClearGarbage(k, n)
  \/ \E w \in Lives, l \in Lives, n \in Steps : BeginRemoval(w, Save(l, n))
  \/ \E l \in Lives, n \in Steps : ResumeRemoval(Save(l, n))

Spec == Init /\ [][Next]_vars
Symmetry == {f \in [Procs -> Procs] : \A p, q \in Procs : p # q => f[p] # f[q]}

(***************************************************************************)
(* What must hold.                                                         *)
(***************************************************************************)
Hosts == SUBSET Procs \ {{}}

\* The newest step that a restore by the hosts H must find.
Reported(H, reach) ==
  LET limit == IF ChainKnown(H, reach) THEN base ELSE Last IN
  Max({IF H \ wiped # {} THEN Min2(decided[1], limit) ELSE 0,
       decided[2],
       IF reach /\ listed[1] <= limit THEN listed[1] ELSE 0,
       IF reach THEN listed[2] ELSE 0})

\* No step that was reported complete is lost while a holder of each part lives.
NothingIsLost == \A H \in Hosts, reach \in BOOLEAN :
  LET s == Choice(H, reach) r == Reported(H, reach) IN r = 0 \/ (s # 0 /\ StepOf(s) >= r)

\* No two processes restore different steps.
OneStepIsRestored == \A p, q \in Procs :
  restored[p] = 0 \/ restored[q] = 0 \/ restored[p] = restored[q]

\* A rolled-back step does not return, where the rollback is on record.
RolledBackStaysAway == \A H \in Hosts, reach \in BOOLEAN :
  LET s == Choice(H, reach) IN s = 0 \/ OnChain(s, ChainKnown(H, reach), FALSE)

\* The log is never behind what was removed.
LogIsNotBehind == \A l \in Lives, n \in Steps : table.e[l][n] = "complete" => Whole(l, n)
=============================================================================
